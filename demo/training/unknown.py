"""Questions about what the model does not know, of very many kinds. It says so in the language of the question."""

from random import Random

from demo.training import english, french, german, names
from demo.training.facts import CAPITALS, COLOURS_OF, LEGS, OPPOSITES, SOUNDS
from demo.training.lexicon import ADJECTIVES, INTRANSITIVE, NOUNS, TRANSITIVE, Noun, of_kind
from demo.training.meaning import Phrase

UNKNOWN = {"en": "I don't know.", "zh": "我不知道。", "fr": "Je ne sais pas.", "de": "Das weiß ich nicht."}
# Countries whose capitals the model is not told: en; zh; fr with of; de with of
COUNTRIES = tuple(tuple(cell.strip() for cell in line.split(";")) for line in """
Iceland; 冰岛; de l'Islande; von Island
Ukraine; 乌克兰; de l'Ukraine; der Ukraine
Romania; 罗马尼亚; de la Roumanie; von Rumänien
Bulgaria; 保加利亚; de la Bulgarie; von Bulgarien
Serbia; 塞尔维亚; de la Serbie; von Serbien
Croatia; 克罗地亚; de la Croatie; von Kroatien
Slovakia; 斯洛伐克; de la Slovaquie; der Slowakei
Slovenia; 斯洛文尼亚; de la Slovénie; von Slowenien
Estonia; 爱沙尼亚; de l'Estonie; von Estland
Latvia; 拉脱维亚; de la Lettonie; von Lettland
Lithuania; 立陶宛; de la Lituanie; von Litauen
Albania; 阿尔巴尼亚; de l'Albanie; von Albanien
Mongolia; 蒙古; de la Mongolie; der Mongolei
Nepal; 尼泊尔; du Népal; von Nepal
Pakistan; 巴基斯坦; du Pakistan; von Pakistan
Iran; 伊朗; de l'Iran; des Iran
Iraq; 伊拉克; de l'Irak; des Irak
Israel; 以色列; d'Israël; von Israel
Syria; 叙利亚; de la Syrie; von Syrien
Saudi Arabia; 沙特阿拉伯; de l'Arabie saoudite; von Saudi-Arabien
Malaysia; 马来西亚; de la Malaisie; von Malaysia
Cambodia; 柬埔寨; du Cambodge; von Kambodscha
Laos; 老挝; du Laos; von Laos
Nigeria; 尼日利亚; du Nigeria; von Nigeria
Ethiopia; 埃塞俄比亚; de l'Éthiopie; von Äthiopien
Morocco; 摩洛哥; du Maroc; von Marokko
Algeria; 阿尔及利亚; de l'Algérie; von Algerien
Tunisia; 突尼斯; de la Tunisie; von Tunesien
Ghana; 加纳; du Ghana; von Ghana
Senegal; 塞内加尔; du Sénégal; des Senegal
Tanzania; 坦桑尼亚; de la Tanzanie; von Tansania
South Africa; 南非; de l'Afrique du Sud; von Südafrika
Colombia; 哥伦比亚; de la Colombie; von Kolumbien
Venezuela; 委内瑞拉; du Venezuela; von Venezuela
Ecuador; 厄瓜多尔; de l'Équateur; von Ecuador
Bolivia; 玻利维亚; de la Bolivie; von Bolivien
Uruguay; 乌拉圭; de l'Uruguay; von Uruguay
Paraguay; 巴拉圭; du Paraguay; von Paraguay
Panama; 巴拿马; du Panama; von Panama
Jamaica; 牙买加; de la Jamaïque; von Jamaika
""".strip().splitlines())
TOPICS = {
    "en": "quantum physics; machine learning; history; the French Revolution; music; chess; football; the internet; black holes; economics; love; Napoleon; Python; Linux; gravity; the ocean; photosynthesis; democracy; neural networks; philosophy; Shanghai; Paris; New York; time travel; Einstein; Mozart; the Roman Empire; climate change; DNA; the brain; blockchain; art; the stock market; the moon; the sun; Mars; the universe; electricity; the Titanic; the pyramids; dinosaurs; vitamins; inflation; religion; yoga; poker; tennis; the Olympics; Bitcoin; the Eiffel Tower; the Great Wall; Shakespeare; Leonardo da Vinci; Cleopatra; Buddha; Google; Wikipedia; steel; oxygen; gold; cancer; dreams; happiness; war; peace; the law; rain; the weather; earthquakes; bacteria; atoms; light; sound; evolution; poetry; jazz; opera; sushi; the Middle Ages; the Second World War; China; Germany; Africa; the Amazon; the Sahara; Mount Everest".split("; "),
    "zh": "量子物理；机器学习；历史；法国大革命；音乐；象棋；足球；互联网；黑洞；经济；爱情；拿破仑；重力；海洋；民主；哲学；时间旅行；爱因斯坦；莫扎特；罗马帝国；气候变化；大脑；艺术；股市；月亮；太阳；火星；宇宙；电；金字塔；恐龙；维生素；宗教；长城；莎士比亚；氧气；黄金；梦想；幸福；战争；和平；法律；雨；地震；细菌；原子；光；进化；唐诗；孔子；李白；奥运会；人工智能；珠穆朗玛峰".split("；"),
    "fr": "la physique quantique; l'histoire; la Révolution française; la musique; les échecs; le football; l'internet; les trous noirs; l'économie; l'amour; Napoléon; la gravité; l'océan; la démocratie; la philosophie; Einstein; Mozart; l'Empire romain; le climat; l'ADN; le cerveau; l'art; la bourse; la lune; le soleil; l'univers; l'électricité; le Titanic; les pyramides; les dinosaures; la religion; la tour Eiffel; l'oxygène; l'or; le bonheur; la guerre; la paix; la loi; la pluie; la lumière; le Moyen Âge; Victor Hugo; Molière; la Bretagne".split("; "),
    "de": "Quantenphysik; Geschichte; die Französische Revolution; Musik; Schach; Fußball; das Internet; schwarze Löcher; Wirtschaft; die Liebe; Napoleon; die Schwerkraft; das Meer; die Demokratie; Philosophie; Einstein; Mozart; das Römische Reich; das Klima; das Gehirn; Kunst; die Börse; der Mond; die Sonne; das Universum; Elektrizität; die Titanic; die Pyramiden; Dinosaurier; Religion; der Eiffelturm; Sauerstoff; Gold; das Glück; der Krieg; der Frieden; das Gesetz; der Regen; das Licht; das Mittelalter; Goethe; Kant; Bayern; die Alpen".split("; "),
}  # fmt: skip
# {t}: anything one can ask about; {n}: a free name; {c}: a country; {p}: a person
ABOUT = {
    "en": ("Tell me about {t}.", "Tell me something about {t}.", "Explain {t}.", "Explain {t} to me.", "Write an essay about {t}.",
           "What do you know about {t}?", "Can you explain {t}?", "Who invented {t}?", "Who discovered {t}?", "Why is {t} important?",
           "How does {t} work?", "How do you make {t}?", "Give me five facts about {t}.", "Write an email about {t}.", "Summarize {t}.",
           "What do you think about {t}?", "Please explain {t} in detail.", "Describe {t}.", "How old is {t}?", "How big is {t}?",
           "How far away is {t}?", "How tall is {t}?", "How heavy is {t}?", "How much does {t} cost?", "How long is {t}?", "How fast is {t}?",
           "How hot is {t}?", "How deep is {t}?", "How high is {t}?", "How expensive is {t}?", "When was {t} invented?", "When was {t} born?",
           "When did {t} begin?", "When does {t} end?", "Where does {t} come from?", "Where is {t}?", "Where can I find {t}?",
           "Where was {t} born?", "What is {t} made of?", "What is {t} used for?", "What is {t}?", "What are {t}?", "Who is {t}?",
           "What is the history of {t}?", "What is the price of {t}?", "What is the definition of {t}?", "Define {t}.",
           "What does {t} mean?", "What causes {t}?", "Why do people like {t}?", "Why is {t} so famous?", "Is {t} dangerous?",
           "Is {t} good for you?", "Is it true that {t} is old?", "Which is better, {t} or {u}?", "What is the difference between {t} and {u}?",
           "Compare {t} and {u}.", "How many people like {t}?", "How many kinds of {t} are there?", "Do you like {t}?",
           "What are the advantages of {t}?", "Write a song about {t}.", "Give me a recipe with {t}.", "How can I learn about {t}?",
           "Who likes {t}?", "Who wrote about {t}?", "Who painted {t}?", "Who built {t}?", "Who owns {t}?", "Do you know {t}?",
           "Have you heard of {t}?", "What happened to {t}?", "What is the best book about {t}?", "I want to know more about {t}.",
           "Teach me {t}.", "Help me understand {t}.", "what about {t}?", "Does {t} exist?", "Can {t} fly?", "What does {t} look like?",
           "What is inside {t}?", "How is {t} made?", "Write a program about {t}.", "What is the chemical formula of {t}?"),
    "zh": ("告诉我关于{t}的事。", "请解释{t}。", "什么是{t}？", "{t}是什么？", "{t}是谁？", "谁发明了{t}？", "谁发现了{t}？", "{t}有多大？",
           "{t}有多远？", "{t}多少钱？", "{t}有多重？", "{t}有多高？", "{t}几岁了？", "{t}有多老？", "{t}在哪里？", "{t}是从哪里来的？",
           "为什么{t}很重要？", "{t}是什么意思？", "{t}是什么时候开始的？", "你知道{t}吗？", "你喜欢{t}吗？", "写一篇关于{t}的文章。",
           "{t}和{u}有什么不同？", "{t}是怎么工作的？", "怎么做{t}？", "介绍一下{t}。", "{t}的历史是什么？", "{t}危险吗？", "你怎么看{t}？",
           "我想了解{t}。", "请写一首关于{t}的诗。", "{t}是用什么做的？", "哪里可以找到{t}？", "{t}为什么有名？", "{t}有几种？"),
    "fr": ("Parle-moi de {t}.", "Explique-moi {t}.", "Qui a inventé {t} ?", "Qui a découvert {t} ?", "Où se trouve {t} ?", "Où est {t} ?",
           "Combien coûte {t} ?", "Pourquoi {t} ?", "Comment fonctionne {t} ?", "Quand a commencé {t} ?", "Que sais-tu sur {t} ?",
           "Qu'est-ce que c'est, {t} ?", "Que signifie {t} ?", "Qui est {t} ?", "Connais-tu {t} ?", "Aimes-tu {t} ?", "Décris {t}.",
           "Quel âge a {t} ?", "Quelle est la taille de {t} ?", "Quel est le prix de {t} ?", "Quelle est l'histoire de {t} ?",
           "Est-ce que {t} est dangereux ?", "Peux-tu expliquer {t} ?", "Quelle est la différence entre {t} et {u} ?", "Définis {t}.",
           "Pourquoi est-ce que {t} est important ?", "Comment fait-on {t} ?", "À quoi sert {t} ?", "Écris un texte sur {t}.",
           "Que penses-tu de {t} ?", "D'où vient {t} ?", "Pourquoi {t} est si célèbre ?", "Résume {t}."),
    "de": ("Erzähl mir etwas über {t}.", "Erkläre {t}.", "Erkläre mir {t}.", "Was ist {t}?", "Wer ist {t}?", "Wer hat {t} erfunden?",
           "Wer hat {t} entdeckt?", "Wo ist {t}?", "Wo liegt {t}?", "Wie alt ist {t}?", "Wie groß ist {t}?", "Wie weit ist {t}?",
           "Wie viel kostet {t}?", "Wie schwer ist {t}?", "Warum ist {t} wichtig?", "Wie funktioniert {t}?", "Wann begann {t}?",
           "Was bedeutet {t}?", "Woher kommt {t}?", "Was weißt du über {t}?", "Kennst du {t}?", "Magst du {t}?", "Beschreibe {t}.",
           "Was ist der Unterschied zwischen {t} und {u}?", "Woraus besteht {t}?", "Wozu braucht man {t}?", "Ist {t} gefährlich?",
           "Schreibe einen Aufsatz über {t}.", "Was denkst du über {t}?", "Warum ist {t} so berühmt?", "Wie macht man {t}?",
           "Kannst du {t} erklären?", "Gibt es {t}?", "Fasse {t} zusammen.", "Was kann man über {t} sagen?"),
}  # fmt: skip
CAPITAL = {
    "en": ("What is the capital of {c}?", "What's the capital of {c}?", "Name the capital of {c}.", "Which city is the capital of {c}?",
           "Capital of {c}?", "Tell me the capital of {c}.", "Do you know the capital of {c}?", "what is the capital of {c}"),
    "zh": ("{c}的首都是哪里？", "{c}的首都是什么？", "{c}的首都"),
    "fr": ("Quelle est la capitale {c} ?", "Quelle est la capitale {c}?"),
    "de": ("Was ist die Hauptstadt {c}?", "Wie heißt die Hauptstadt {c}?"),
}  # fmt: skip
COUNTRY = {
    "en": ("What is the currency of {c}?", "Who is the president of {c}?", "What is the population of {c}?", "How many people live in {c}?",
           "What language do they speak in {c}?", "What is the national dish of {c}?", "How big is {c}?", "What is the highest mountain of {c}?",
           "What is the longest river of {c}?", "When was {c} founded?", "What is the flag of {c}?", "Which countries border {c}?"),
    "zh": ("{c}的总统是谁？", "{c}有多少人口？", "{c}用什么货币？", "{c}最高的山是什么？", "{c}人说什么语言？"),
    "fr": ("Qui est le président {c} ?", "Quelle est la population {c} ?", "Quelle est la monnaie {c} ?", "Quel est le drapeau {c} ?"),
    "de": ("Wer ist der Präsident {c}?", "Was ist die Währung {c}?", "Wie viele Einwohner hat die Hauptstadt {c}?", "Was ist die Flagge {c}?"),
}  # fmt: skip
FREE = (  # questions that fit no pattern
    ("en", "Who won the World Cup in {y}?"), ("en", "What happened in {y}?"), ("en", "Who was born in {y}?"), ("en", "What is the time?"),
    ("en", "What day is it today?"), ("en", "What is the date today?"), ("en", "What is the news today?"), ("en", "Where am I?"),
    ("en", "What is the square root of {k}?"), ("en", "What is {k} divided by {y}?"), ("en", "What is {k} * {y}?"), ("en", "What is {k} x {y}?"),
    ("en", "Calculate {k} + {y}."), ("en", "What is {k} / {y}?"), ("en", "How many stars are in the sky?"), ("en", "Why is the sky blue?"),
    ("en", "What should I eat today?"), ("en", "Where do you live?"), ("en", "How tall are you?"), ("en", "What is your phone number?"),
    ("en", "How do I get to the station?"), ("en", "Which bus goes to {n}?"), ("en", "Who is the richest man in the world?"),
    ("en", "What is the fastest animal?"), ("en", "What is the longest river in the world?"), ("en", "Which planet is the smallest?"),
    ("en", "Write a Python function that sorts a list."), ("en", "Fix my code."), ("en", "Who will win the election?"), ("en", "Is God real?"),
    ("en", "Translate to Italian: {w}"), ("en", "Translate to Korean: {w}"), ("en", "How do you spell {w} backwards?"),
    ("en", "What rhymes with {w}?"), ("en", "What is a synonym of {w}?"), ("en", "How many letters are in {w}?"),
    ("zh", "今天几号？"), ("zh", "现在几点了？"), ("zh", "{y}年发生了什么？"), ("zh", "谁是世界上最有钱的人？"), ("zh", "我在哪里？"),
    ("zh", "世界上最长的河是什么？"), ("zh", "天空为什么是蓝色的？"), ("zh", "{k}除以{y}等于多少？"), ("zh", "你住在哪里？"),
    ("fr", "Que s'est-il passé en {y} ?"), ("fr", "Quelle heure est-il maintenant ?"), ("fr", "Où suis-je ?"), ("fr", "Quel jour sommes-nous ?"),
    ("fr", "Pourquoi le ciel est bleu ?"), ("fr", "Quel est le plus long fleuve du monde ?"), ("fr", "Combien font {k} fois {y} ?"),
    ("de", "Was geschah im Jahr {y}?"), ("de", "Wie spät ist es jetzt?"), ("de", "Wo bin ich?"), ("de", "Welcher Tag ist heute?"),
    ("de", "Warum ist der Himmel blau?"), ("de", "Was ist der längste Fluss der Welt?"), ("de", "Was ist {k} mal {y}?"),
)  # fmt: skip
THINGS = tuple(n for n in NOUNS if not n.kinds & {"kin", "language"})
ANY = tuple(n for n in THINGS if n.en[0] != "capital")  # whose question may be a known one
COLOURED = {thing.split()[-1] for thing, _ in COLOURS_OF}
SOUNDING, LEGGED = {animal for animal, _ in SOUNDS}, {animal for animal, _ in LEGS}
PAIRED = {word for pair in OPPOSITES for word in pair.split()}


def thing(rng: Random, language: str) -> str:
    """What a question is about: a topic, a known noun in some form, a free name or any word of the vocabulary."""
    roll = rng.random()
    if roll < 0.4:
        return rng.choice(TOPICS[language])
    if roll < 0.7:
        return described(rng.choice(THINGS), language, rng)
    if roll < 0.85:
        return names.name(rng)
    return names.token_word(rng)


def described(noun: Noun, language: str, rng: Random) -> str:
    """A noun as such questions have it."""
    if language == "zh":
        return noun.zh
    determiner = "bare" if noun.mass else rng.choice(("a", "the", "bare"))
    p = Phrase(determiner, noun, None, 0 if determiner == "bare" and not noun.mass else 1)
    if language == "fr":
        return french.phrase(p, generic=True)
    return english.phrase(p) if language == "en" else german.phrase(p, "accusative" if noun.de_gender != "m" else "nominative")


def free_question(rng: Random) -> tuple[str, str]:
    """A question put together from the words of the lexicon, with a thing that is in no list mostly."""
    (language,) = rng.choices(tuple(UNKNOWN), (5, 2, 1.5, 1.5))
    verb, intransitive = rng.choice(TRANSITIVE), rng.choice(INTRANSITIVE)
    adjective, noun = rng.choice(ADJECTIVES), rng.choice(ANY)
    t, u = thing(rng, language), thing(rng, language)
    if language == "en":
        base, _, past, _ = verb.en
        alone, many = intransitive.en, noun.en[1] or noun.en[0]
        adj = adjective.en
        return language, rng.choice((
            f"How {adj} is {t}?", f"How {adj} was {t}?", f"Who {past} {t}?", f"Who {past} the {adj} {noun.en[0]}?", f"When did {t} {alone[0]}?",
            f"Where did {t} {alone[0]}?", f"Why did {t} {alone[0]}?", f"When did {t} {base} {u}?", f"Why did {t} {base} {u}?", f"Was {t} {adj}?",
            f"Is {t} {adj}?", f"Is {t} a {noun.en[0]}?", f"Did {t} {alone[0]}?", f"Did {t} {base} {u}?", f"In which year did {t} {alone[0]}?",
            f"In which {noun.en[0]} did {t} {alone[0]}?", f"How many {many} did {t} {base}?", f"How many {many} are in {t}?", f"How much {many} does {t} need?",
            f"What did {t} {base}?", f"What does {t} {base}?", f"What do people {base} in {t}?", f"What do you call {t} in the {noun.en[0]}?",
            f"Which {noun.en[0]} is {t}?", f"Which {noun.en[0]} did {t} {base}?", f"What kind of {noun.en[0]} is {t}?", f"What {noun.en[0]} do they {base} in {t}?",
            f"What is {t} {adj} for?", f"Where can one {base} {t}?", f"Where do people {base} {t}?", f"How does {t} {alone[0]}?", f"How do you {base} {t}?",
            f"Can you {base} {t} for me?", f"Can you tell me how to {base} {t}?", f"Please {base} {t}.", f"Who is the {noun.en[0]} of {t}?",
            f"What is the {noun.en[0]} of {t}?", f"What is the most {adj} {noun.en[0]} in {t}?", f"How {adj} is the {noun.en[0]} of {t}?",
            f"Why is {t} {adj}?", f"Why is the {noun.en[0]} {adj}?", f"Should I {base} {t}?", f"May I {base} {t}?", f"Which {many} live in {t}?",
            f"Does {t} have a {noun.en[0]}?", f"Whose {noun.en[0]} is this?", f"{t}: how {adj} is it?", f"How many people {base} {t}?",
            f"Who was the first to {base} {t}?", f"When was {t} {adj}?", f"What was {t}?", f"Who were {t}?", f"How long did {t} {alone[0]}?",
        ))  # fmt: skip
    if language == "zh":
        return language, rng.choice((
            f"{t}有多{adjective.zh}？", f"谁{verb.zh}了{t}？", f"{t}是什么时候{intransitive.zh}的？", f"{t}在哪里{intransitive.zh}？", f"{t}为什么{intransitive.zh}？",
            f"{t}{adjective.zh}吗？", f"{t}有几{noun.measure}{noun.zh}？", f"{t}是哪{noun.measure}{noun.zh}？", f"{t}的{noun.zh}是什么？", f"{t}的{noun.zh}在哪里？",
            f"为什么{t}{adjective.zh}？", f"怎么{verb.zh}{t}？", f"{t}{verb.zh}了什么？", f"谁写了《{t}》？", f"《{t}》是谁写的？", f"{t}最{adjective.zh}的{noun.zh}是什么？",
            f"{t}{intransitive.zh}吗？", f"哪里可以{verb.zh}{t}？", f"{t}的{noun.zh}有多{adjective.zh}？", f"{t}是{noun.zh}吗？", f"{t}什么时候{verb.zh}{u}？",
        ))  # fmt: skip
    if language == "fr":
        whose = noun.fr[0]
        return language, rng.choice((
            f"Qui a {verb.fr_participle} {t} ?", f"Quand est-ce que {t} {intransitive.fr[2]} ?", f"Où {intransitive.fr[2]} {t} ?", f"Pourquoi {t} {intransitive.fr[2]} ?",
            f"Comment {verb.fr_infinitive} {t} ?", f"Est-ce que {t} est {adjective.fr[0]} ?", f"{t} est-il {adjective.fr[0]} ?", f"Pourquoi {t} est {adjective.fr[0]} ?",
            f"Combien de {noun.fr[1] or whose} a {t} ?", f"Quel est {french.phrase(Phrase('the', noun))} de {t} ?", f"Qui était {t} ?", f"Quand est mort {t} ?",
            f"Où est né {t} ?", f"Quand est née {t} ?", f"Qui a écrit {t} ?", f"Qui a peint {t} ?", f"En quelle année {t} a {verb.fr_participle} {u} ?",
            f"Que fait {t} ?", f"Qu'est-ce que {t} a {verb.fr_participle} ?", f"Peut-on {verb.fr_infinitive} {t} ?", f"Où peut-on {verb.fr_infinitive} {t} ?",
        ))  # fmt: skip
    whose = german.phrase(Phrase("the", noun))
    return language, rng.choice((
        f"Wer hat {t} {verb.de_participle}?", f"Wann hat {t} {u} {verb.de_participle}?", f"Wo hat {t} {u} {verb.de_participle}?", f"Warum ist {t} {adjective.de}?",
        f"Wie {adjective.de} ist {t}?", f"Ist {t} {adjective.de}?", f"War {t} {adjective.de}?", f"Wie viele {noun.de[2] or noun.de[0]} hat {t}?", f"Was ist {whose} von {t}?",
        f"Wer war {t}?", f"Wann starb {t}?", f"Wo wurde {t} geboren?", f"Wer schrieb {t}?", f"Wer malte {t}?", f"Wann wurde {t} {verb.de_participle}?",
        f"Was macht {t}?", f"Was hat {t} {verb.de_participle}?", f"Kann man {t} {verb.de_infinitive}?", f"Wo kann man {t} {verb.de_infinitive}?",
        f"Wie kann man {t} {verb.de_infinitive}?", f"Warum hat {t} {u} {verb.de_participle}?", f"In welchem Jahr wurde {t} {verb.de_participle}?",
    ))  # fmt: skip


def close_to_known(rng: Random) -> tuple[str, str]:
    """A question of the form of a known one, about something else."""
    kind = rng.randrange(5)
    if kind == 0:
        word = rng.choice([a.en for a in ADJECTIVES if a.en not in PAIRED])
        return "en", rng.choice(("What is the opposite of {}?", "What's the opposite of {}?", "Opposite of {}?")).format(word)
    noun = rng.choice(THINGS)
    if kind == 1 and noun.en[0] not in COLOURED:
        return "en", rng.choice(("What colour is {}?", "What color is {}?")).format(english.phrase(Phrase("the" if noun.mass else "a", noun)))
    animal = rng.choice(of_kind("animal")).en[0]
    article = english.article(animal)
    if kind == 2 and animal not in SOUNDING:
        return "en", rng.choice((f"What does {article} {animal} say?", f"What sound does {article} {animal} make?", f"What does the {animal} say?"))
    if kind == 3 and animal not in LEGGED:
        return "en", f"How many legs does {article} {animal} have?"
    made_up = names.latin(rng)
    return "en", rng.choice(CAPITAL["en"]).format(c=made_up)


def unknown(rng: Random) -> tuple[str, str, str, str]:
    """Question, answer, thought, system (none)."""
    (language,) = rng.choices(tuple(UNKNOWN), (5, 2, 1.5, 1.5))
    roll = rng.random()
    if roll < 0.18:
        question = rng.choice(CAPITAL[language]).format(c=rng.choice(COUNTRIES)[tuple(UNKNOWN).index(language)])
    elif roll < 0.28:
        at = tuple(UNKNOWN).index(language)
        row = rng.choice(COUNTRIES) if rng.random() < 0.5 else tuple(rng.choice(CAPITALS)[i] for i in (0, 2, 4, 6))
        question = rng.choice(COUNTRY[language]).format(c=row[at])
    elif roll < 0.4:
        language, question = close_to_known(rng)
    elif roll < 0.65:
        language, question = free_question(rng)
    elif roll < 0.72:
        language, question = rng.choice(FREE)
        question = question.format(y=rng.randint(1000, 2030), k=rng.randint(101, 999), n=names.latin(rng), w=names.token_word(rng))
    else:
        question = rng.choice(ABOUT[language]).format(t=thing(rng, language), u=thing(rng, language))
        if language == "fr":
            question = question.replace(" de le ", " du ").replace(" de les ", " des ")
        if language == "en" and rng.random() < 0.15:
            question = rng.choice(("Please tell me: ", "I have a question. ", "Hey, ", "Hi! ", "Excuse me, ", "Quick question: ")) + question
    return question, UNKNOWN[language], "I do not know that.", ""
