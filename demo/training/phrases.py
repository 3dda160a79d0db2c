"""Fixed phrases that people try first, in seven languages."""

CODES = ("en", "zh-CN", "fr", "de", "es", "ja", "ru")

# One line a phrase, in the order of CODES; further ways to write the same source follow after "|" (only read, never
# written). A form after "=" is only written: as a source it means another line.
PHRASES = tuple(tuple(tuple(form.strip() for form in cell.split("|")) for cell in line.split(" ; ")) for line in """
Hello world!|Hello, world!|Hello World!|hello world! ; 你好世界！|你好，世界！ ; Bonjour le monde !|Bonjour le monde!|Bonjour tout le monde ! ; Hallo Welt!|Hallo, Welt! ; ¡Hola mundo!|¡Hola, mundo! ; こんにちは世界！|こんにちは、世界！ ; Привет, мир!|Привет мир!
Hello!|Hi! ; 你好！|您好！ ; Bonjour !|Bonjour! ; Hallo! ; ¡Hola! ; こんにちは！ ; Привет!
Good morning!|Good Morning! ; 早上好！|早安！ ; =Bonjour !|Bonne matinée !|Bonjour, bonne matinée ! ; Guten Morgen! ; ¡Buenos días! ; おはようございます！ ; Доброе утро!
Good evening! ; 晚上好！ ; Bonsoir !|Bonsoir! ; Guten Abend! ; ¡Buenas tardes! ; こんばんは！ ; Добрый вечер!
Good night! ; 晚安！ ; Bonne nuit !|Bonne nuit! ; Gute Nacht! ; ¡Buenas noches! ; おやすみなさい！ ; Спокойной ночи!
Goodbye!|Bye! ; 再见！ ; Au revoir !|Au revoir! ; Auf Wiedersehen! ; ¡Adiós! ; さようなら！ ; До свидания!
See you tomorrow! ; 明天见！ ; À demain !|À demain! ; Bis morgen! ; ¡Hasta mañana! ; また明日！ ; До завтра!
Thank you!|Thanks! ; 谢谢！|谢谢你！ ; Merci !|Merci! ; Danke! ; ¡Gracias! ; ありがとう！ ; Спасибо!
Thank you very much!|Thank you so much! ; 非常感谢！ ; Merci beaucoup !|Merci beaucoup! ; Vielen Dank! ; ¡Muchas gracias! ; どうもありがとうございます！ ; Большое спасибо!
You are welcome!|You're welcome! ; 不客气！ ; De rien !|De rien! ; Gern geschehen! ; ¡De nada! ; どういたしまして！ ; Пожалуйста!
How are you?|How are you doing? ; 你好吗？|你怎么样？ ; Comment vas-tu ?|Comment vas-tu?|Comment ça va ? ; Wie geht es dir?|Wie geht's? ; ¿Cómo estás? ; お元気ですか？ ; Как дела?
I am fine.|I'm fine. ; 我很好。 ; Je vais bien. ; Mir geht es gut. ; Estoy bien. ; 元気です。 ; У меня всё хорошо.
I love you.|I love you! ; 我爱你。|我爱你！ ; Je t'aime.|Je t'aime ! ; Ich liebe dich.|Ich liebe dich! ; Te quiero. ; 愛しています。 ; Я тебя люблю.
What is your name?|What's your name? ; 你叫什么名字？ ; Comment t'appelles-tu ?|Comment t'appelles-tu? ; Wie heißt du? ; ¿Cómo te llamas? ; お名前は何ですか？ ; Как тебя зовут?
Nice to meet you.|Nice to meet you! ; 很高兴认识你。|很高兴认识你！ ; Ravi de te rencontrer. ; Schön, dich kennenzulernen. ; Encantado de conocerte. ; はじめまして。 ; Приятно познакомиться.
Excuse me. ; 打扰一下。 ; Excusez-moi. ; Entschuldigung. ; Disculpe. ; すみません。 ; Извините.
I am sorry.|I'm sorry. ; 对不起。 ; Je suis désolé. ; Es tut mir leid. ; Lo siento. ; ごめんなさい。 ; Мне очень жаль.
Yes. ; 是的。 ; Oui. ; Ja. ; Sí. ; はい。 ; Да.
No. ; 不。 ; Non. ; Nein. ; No. ; いいえ。 ; Нет.
Please. ; 请。 ; S'il vous plaît. ; Bitte. ; Por favor. ; お願いします。 ; Прошу.
Happy birthday! ; 生日快乐！ ; Joyeux anniversaire !|Joyeux anniversaire! ; Alles Gute zum Geburtstag! ; ¡Feliz cumpleaños! ; お誕生日おめでとう！ ; С днём рождения!
Happy New Year! ; 新年快乐！ ; Bonne année !|Bonne année! ; Frohes neues Jahr! ; ¡Feliz año nuevo! ; 明けましておめでとうございます！ ; С Новым годом!
Good luck! ; 祝你好运！ ; Bonne chance !|Bonne chance! ; Viel Glück! ; ¡Buena suerte! ; 頑張ってください！ ; Удачи!
Welcome! ; 欢迎！ ; Bienvenue !|Bienvenue! ; Willkommen! ; ¡Bienvenido! ; ようこそ！ ; Добро пожаловать!
Where is the toilet?|Where is the bathroom? ; 厕所在哪里？|洗手间在哪里？ ; Où sont les toilettes ?|Où sont les toilettes? ; Wo ist die Toilette? ; ¿Dónde está el baño? ; トイレはどこですか？ ; Где туалет?
I do not understand.|I don't understand. ; 我不明白。 ; Je ne comprends pas. ; Ich verstehe nicht. ; No entiendo. ; わかりません。 ; Я не понимаю.
How much does it cost?|How much is it? ; 多少钱？ ; Combien ça coûte ?|Combien ça coûte? ; Wie viel kostet das? ; ¿Cuánto cuesta? ; いくらですか？ ; Сколько это стоит?
What time is it? ; 现在几点？ ; Quelle heure est-il ?|Quelle heure est-il? ; Wie spät ist es? ; ¿Qué hora es? ; 今何時ですか？ ; Который час?
I am hungry.|I'm hungry. ; 我饿了。 ; J'ai faim. ; Ich habe Hunger. ; Tengo hambre. ; お腹が空きました。 ; Я голоден.
The weather is nice today. ; 今天天气很好。 ; Il fait beau aujourd'hui. ; Das Wetter ist heute schön. ; Hoy hace buen tiempo. ; 今日は天気がいいです。 ; Сегодня хорошая погода.
This is a test.|this is a test. ; 这是一个测试。 ; Ceci est un test.|C'est un test. ; Das ist ein Test.|Dies ist ein Test. ; Esto es una prueba. ; これはテストです。 ; Это тест.
The quick brown fox jumps over the lazy dog. ; 敏捷的棕色狐狸跳过懒狗。 ; Le rapide renard brun saute par-dessus le chien paresseux. ; Der schnelle braune Fuchs springt über den faulen Hund. ; El rápido zorro marrón salta sobre el perro perezoso. ; 素早い茶色の狐が怠け者の犬を飛び越える。 ; Быстрая бурая лиса прыгает через ленивую собаку.
Artificial intelligence is changing the world. ; 人工智能正在改变世界。 ; L'intelligence artificielle change le monde. ; Künstliche Intelligenz verändert die Welt. ; La inteligencia artificial está cambiando el mundo. ; 人工知能は世界を変えています。 ; Искусственный интеллект меняет мир.
""".strip().splitlines())
