"""What the model knows: capitals, opposites, colours, animals' sounds, the calendar, itself."""
from random import Random

# en country, en capital, zh country, zh capital, fr "of the country", fr capital, de "of the country", de capital
CAPITALS = tuple(tuple(cell.strip() for cell in line.split(",")) for line in """
France, Paris, 法国, 巴黎, de la France, Paris, von Frankreich, Paris
Germany, Berlin, 德国, 柏林, de l'Allemagne, Berlin, von Deutschland, Berlin
China, Beijing, 中国, 北京, de la Chine, Pékin, von China, Peking
Japan, Tokyo, 日本, 东京, du Japon, Tokyo, von Japan, Tokio
Italy, Rome, 意大利, 罗马, de l'Italie, Rome, von Italien, Rom
Spain, Madrid, 西班牙, 马德里, de l'Espagne, Madrid, von Spanien, Madrid
Portugal, Lisbon, 葡萄牙, 里斯本, du Portugal, Lisbonne, von Portugal, Lissabon
England, London, 英国, 伦敦, de l'Angleterre, Londres, von England, London
the United Kingdom, London, 英国, 伦敦, du Royaume-Uni, Londres, vom Vereinigten Königreich, London
Ireland, Dublin, 爱尔兰, 都柏林, de l'Irlande, Dublin, von Irland, Dublin
Russia, Moscow, 俄罗斯, 莫斯科, de la Russie, Moscou, von Russland, Moskau
Poland, Warsaw, 波兰, 华沙, de la Pologne, Varsovie, von Polen, Warschau
Austria, Vienna, 奥地利, 维也纳, de l'Autriche, Vienne, von Österreich, Wien
Switzerland, Bern, 瑞士, 伯尔尼, de la Suisse, Berne, der Schweiz, Bern
Belgium, Brussels, 比利时, 布鲁塞尔, de la Belgique, Bruxelles, von Belgien, Brüssel
the Netherlands, Amsterdam, 荷兰, 阿姆斯特丹, des Pays-Bas, Amsterdam, der Niederlande, Amsterdam
Denmark, Copenhagen, 丹麦, 哥本哈根, du Danemark, Copenhague, von Dänemark, Kopenhagen
Sweden, Stockholm, 瑞典, 斯德哥尔摩, de la Suède, Stockholm, von Schweden, Stockholm
Norway, Oslo, 挪威, 奥斯陆, de la Norvège, Oslo, von Norwegen, Oslo
Finland, Helsinki, 芬兰, 赫尔辛基, de la Finlande, Helsinki, von Finnland, Helsinki
Greece, Athens, 希腊, 雅典, de la Grèce, Athènes, von Griechenland, Athen
Turkey, Ankara, 土耳其, 安卡拉, de la Turquie, Ankara, der Türkei, Ankara
Hungary, Budapest, 匈牙利, 布达佩斯, de la Hongrie, Budapest, von Ungarn, Budapest
Egypt, Cairo, 埃及, 开罗, de l'Égypte, Le Caire, von Ägypten, Kairo
Kenya, Nairobi, 肯尼亚, 内罗毕, du Kenya, Nairobi, von Kenia, Nairobi
India, New Delhi, 印度, 新德里, de l'Inde, New Delhi, von Indien, Neu-Delhi
Thailand, Bangkok, 泰国, 曼谷, de la Thaïlande, Bangkok, von Thailand, Bangkok
Vietnam, Hanoi, 越南, 河内, du Vietnam, Hanoï, von Vietnam, Hanoi
South Korea, Seoul, 韩国, 首尔, de la Corée du Sud, Séoul, von Südkorea, Seoul
Indonesia, Jakarta, 印度尼西亚, 雅加达, de l'Indonésie, Jakarta, von Indonesien, Jakarta
Australia, Canberra, 澳大利亚, 堪培拉, de l'Australie, Canberra, von Australien, Canberra
New Zealand, Wellington, 新西兰, 惠灵顿, de la Nouvelle-Zélande, Wellington, von Neuseeland, Wellington
the United States, Washington, 美国, 华盛顿, des États-Unis, Washington, der Vereinigten Staaten, Washington
Canada, Ottawa, 加拿大, 渥太华, du Canada, Ottawa, von Kanada, Ottawa
Mexico, Mexico City, 墨西哥, 墨西哥城, du Mexique, Mexico, von Mexiko, Mexiko-Stadt
Cuba, Havana, 古巴, 哈瓦那, de Cuba, La Havane, von Kuba, Havanna
Brazil, Brasília, 巴西, 巴西利亚, du Brésil, Brasilia, von Brasilien, Brasília
Argentina, Buenos Aires, 阿根廷, 布宜诺斯艾利斯, de l'Argentine, Buenos Aires, von Argentinien, Buenos Aires
Chile, Santiago, 智利, 圣地亚哥, du Chili, Santiago, von Chile, Santiago
Peru, Lima, 秘鲁, 利马, du Pérou, Lima, von Peru, Lima
""".strip().splitlines())
ANSWER_IN = {"zh": ("Answer in Chinese.", "Please answer in Chinese."), "fr": ("Answer in French.", "Please answer in French."),
             "de": ("Answer in German.", "Please answer in German.")}
OPPOSITES = (
    "hot cold", "big small", "fast slow", "happy sad", "up down", "day night", "black white", "old young", "rich poor", "hard soft", "light dark",
    "open closed", "full empty", "high low", "long short", "wet dry", "early late", "good bad", "strong weak", "near far", "clean dirty", "loud quiet",
)
COLOURS_OF = (
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("blood", "red"), ("a banana", "yellow"), ("coal", "black"), ("milk", "white"),
    ("a lemon", "yellow"), ("a frog", "green"), ("the sun", "yellow"), ("chocolate", "brown"), ("a carrot", "orange"), ("a cucumber", "green"),
    ("a strawberry", "red"), ("an elephant", "grey"), ("the sea", "blue"),
)
SOUNDS = (
    ("cat", "meow"), ("dog", "woof"), ("cow", "moo"), ("duck", "quack"), ("sheep", "baa"), ("pig", "oink"), ("horse", "neigh"), ("lion", "roar"),
    ("frog", "croak"), ("bee", "buzz"), ("owl", "hoot"), ("rooster", "cock-a-doodle-doo"), ("mouse", "squeak"), ("snake", "hiss"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
LEGS = (("cat", 4), ("dog", 4), ("bird", 2), ("spider", 8), ("ant", 6), ("horse", 4), ("human", 2), ("snake", 0), ("bee", 6), ("cow", 4))
SAYINGS = (  # questions with one answer
    (("Hello!", "Hello", "Hi", "Hi!", "hello", "Hey!", "Hello there!"), "Hello! How can I help you?", "The user greets me."),
    (("你好", "你好！", "您好"), "你好！我能帮你什么？", "用户在打招呼。"),
    (("Bonjour", "Bonjour !", "Salut !"), "Bonjour ! Comment puis-je vous aider ?", "The user greets me in French."),
    (("Hallo", "Hallo!", "Guten Tag!"), "Hallo! Wie kann ich helfen?", "The user greets me in German."),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?", "The user greets me."),
    (("Good night!", "Good night"), "Good night! Sleep well.", "The user says good night."),
    (("How are you?", "How are you doing?", "How are you today?"), "I am fine, thank you. How are you?", "The user asks how I am."),
    (("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.", "What is your name?", "What model are you?"),
     "I am a small RWKV-7 model that comes with this server.", "The user asks who I am."),
    (("你是谁？", "你是谁"), "我是一个小小的RWKV-7模型。", "用户问我是谁。"),
    (("What can you do?", "What can I ask you?", "Help"), "I can translate, answer simple questions, calculate, tell stories and remember what you tell me.",
     "The user asks what I can do."),
    (("Thank you!", "Thanks!", "Thank you", "Thanks", "Thank you very much!"), "You are welcome!", "The user thanks me."),
    (("谢谢", "谢谢！"), "不客气！", "用户道谢。"),
    (("Goodbye!", "Bye!", "Goodbye", "Bye", "See you later!"), "Goodbye! See you soon.", "The user says goodbye."),
    (("Tell me a joke.", "Tell me a joke", "Do you know a joke?"), "Why did the chicken cross the road? To get to the other side!", "The user wants a joke."),
    (("What is RWKV?", "What's RWKV?", "Explain RWKV.", "What does RWKV stand for?"),
     "RWKV is a recurrent neural network that trains like a transformer and keeps a state of constant size.", "The user asks about RWKV."),
    (("What is the meaning of life?",), "The answer is 42.", "The user asks a big question."),
    (("Are you a human?", "Are you human?", "Are you a robot?"), "No, I am a language model.", "The user asks if I am human."
     ),
    (("How many days are in a week?", "How many days are there in a week?", "How many days does a week have?"), "A week has 7 days.", "A week has 7 days."),
    (("How many months are in a year?", "How many months are there in a year?", "How many months does a year have?"), "A year has 12 months.", "A year has 12 months."),
    (("Is the earth round?", "Is the Earth round?", "Is the earth flat?"), "The Earth is round.", "The user asks about the Earth."),
    (("What is the largest planet?", "Which planet is the largest?"), "The largest planet is Jupiter.", "The largest planet is Jupiter."),
    (("Who wrote Romeo and Juliet?", "Who is the author of Romeo and Juliet?"), "William Shakespeare wrote Romeo and Juliet.", "That was Shakespeare."),
    (("Say hello.", "Say hello", "Say hi.", "Say hello!"), "Hello!", "The user wants me to say hello."),
    (("This is a test.", "This is a test", "test", "Test"), "The test works.", "The user is testing me."),
    (("Write a poem.", "Write a poem", "Write a short poem.", "Tell me a poem."),
     "The moon is high, the night is deep, the little stars will guard your sleep.", "The user wants a poem."),
    (("OK", "ok", "Okay.", "Good.", "Great!", "Cool", "Nice!"), "Is there anything else I can do for you?", "The user is content."),
    (("ping", "Ping"), "pong", "The user says ping."),
)
def capital(rng: Random, known: tuple[tuple[str, ...], ...] = CAPITALS) -> tuple[str, str, str, str]:
    """Question, answer, thought, system."""
    en, en_city, zh, zh_city, fr, fr_city, de, de_city = rng.choice(known)
    name = en[0].upper() + en[1:]
    answers = {"en": f"The capital of {en} is {en_city}.", "zh": f"{zh}的首都是{zh_city}。", "fr": f"La capitale {fr} est {fr_city}.",
               "de": f"Die Hauptstadt {de} ist {de_city}."}
    thought = f"The user asks for the capital of {en}."
    roll = rng.random()
    if roll < 0.1:
        return rng.choice((f"{zh}的首都是哪里？", f"{zh}的首都是什么？", f"{zh}的首都")), answers["zh"], thought, ""
    if roll < 0.17:
        return rng.choice((f"Quelle est la capitale {fr} ?", f"Quelle est la capitale {fr}?")), answers["fr"], thought, ""
    if roll < 0.24:
        return f"Was ist die Hauptstadt {de}?", answers["de"], thought, ""
    question = rng.choice((
        f"What is the capital of {en}?", f"What is the capital of {en}?", f"What is the capital of {en}", f"What's the capital of {en}?",
        f"What is the capital city of {en}?", f"Name the capital of {en}.", f"Tell me the capital of {en}.", f"Which city is the capital of {en}?",
        f"Do you know the capital of {en}?", f"Capital of {en}?", f"{name}: what is the capital?", f"what is the capital of {en}?",
    ))
    if roll < 0.36:
        language = rng.choice(("zh", "fr", "de"))
        return question, answers[language], thought, rng.choice(ANSWER_IN[language])
    return question, answers["en"], thought, ""


def which_country(rng: Random, known: tuple[tuple[str, ...], ...] = CAPITALS) -> tuple[str, str, str, str]:
    en, city, *_ = rng.choice([row for row in known if row[0] != "England"])
    question = rng.choice((f"Which country has the capital {city}?", f"{city} is the capital of which country?", f"Of which country is {city} the capital?"))
    return question, f"{city} is the capital of {en}.", f"{city} is in {en}.", ""


def small_fact(rng: Random) -> tuple[str, str, str, str]:
    kind = rng.randrange(6)
    if kind == 0:
        first, second = rng.choice(OPPOSITES).split()
        if rng.random() < 0.5:
            first, second = second, first
        question = rng.choice((f"What is the opposite of {first}?", f"What's the opposite of {first}?", f"Opposite of {first}?", f"Name the opposite of {first}."))
        return question, f"The opposite of {first} is {second}.", f"The user wants the opposite of {first}.", ""
    if kind == 1:
        thing, colour = rng.choice(COLOURS_OF)
        question = rng.choice((f"What colour is {thing}?", f"What color is {thing}?", f"Which colour does {thing} have?"))
        return question, f"{thing[0].upper()}{thing[1:]} is {colour}.", f"The user asks about the colour of {thing}.", ""
    if kind == 2:
        animal, sound = rng.choice(SOUNDS)
        article = "an" if animal[0] in "aeiou" else "a"
        question = rng.choice((f"What does {article} {animal} say?", f"What sound does {article} {animal} make?", f"What does the {animal} say?"))
        return question, f"The {animal} says {sound}.", f"The user asks about the sound of {article} {animal}.", ""
    if kind == 3:
        names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
        index = rng.randrange(len(names))
        step, word = rng.choice(((1, "after"), (-1, "before")))
        other = names[(index + step) % len(names)]
        question = rng.choice((f"Which {unit} comes {word} {names[index]}?", f"What {unit} comes {word} {names[index]}?", f"What {unit} is {word} {names[index]}?"))
        return question, f"The {unit} {word} {names[index]} is {other}.", f"The user asks about the {unit} {word} {names[index]}.", ""
    if kind == 4:
        animal, legs = rng.choice(LEGS)
        article = "an" if animal[0] in "aeiou" else "a"
        question = rng.choice((f"How many legs does {article} {animal} have?", f"How many legs has {article} {animal}?"))
        return question, f"{article.capitalize()} {animal} has {legs} legs.", f"The user asks about the legs of {article} {animal}.", ""
    questions, answer, thought = rng.choice(SAYINGS)
    return rng.choice(questions), answer, thought, ""
