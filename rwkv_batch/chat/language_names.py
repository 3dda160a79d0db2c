"""The languages that requests can name, and the names by which a model knows them.

Names and scripts are those of Unicode CLDR, with which test/routes/test_languages.py compares them. The codes
are those of ISO 639, of Google, Bing, DeepL and LibreTranslate, and of the plugins that send such codes.
"""

# A line for each language: its codes, the first of them as in BCP 47 | its script, unless that is Latin | its
# English names, the first of them the one in prompts | its own names
LANGUAGES = """
aa aar||Afar|Qafar
ab abk|Cyrl|Abkhaz/Abkhazian|Аԥсшәа
ace||Acehnese|
ach||Acholi/Acoli|
af afr||Afrikaans|
ak aka||Akan|
alz||Alur|
am amh|Ethi|Amharic|አማርኛ
an arg||Aragonese|aragonés
ar ara arb|Arab|Arabic/Modern Standard Arabic|العربية/عربي
ary|Arab|Moroccan Arabic|
arz|Arab|Egyptian Arabic|
as asm|Beng|Assamese|অসমীয়া
ast||Asturian|asturianu
av ava|Cyrl|Avar/Avaric|
awa|Deva|Awadhi|
ay aym ayr||Aymara|
az aze azj||Azerbaijani|azərbaycan/azərbaycanca
ba bak|Cyrl|Bashkir|башҡорт/башҡортса
bal bcc|Arab|Baluchi/Balochi|بلۆچی
ban||Balinese|
bbc||Batak Toba|
bci||Baoulé/Baule|
be bel|Cyrl|Belarusian|беларуская/беларуская мова
bem||Bemba|Ichibemba
ber|Tfng|Tamazight/Berber|
bew||Betawi|
bg bul|Cyrl|Bulgarian|български/български език
bho bh bih|Deva|Bhojpuri|भोजपुरी
bi bis||Bislama|
bik bcl||Bikol/Bikolano|
bm bam||Bambara|bamanakan
bn ben|Beng|Bengali/Bangla|বাংলা
bo bod tib|Tibt|Tibetan|བོད་སྐད་
br bre||Breton|brezhoneg
brx|Deva|Bodo|बर’
bs bos||Bosnian|bosanski
bts||Batak Simalungun|
btx||Batak Karo/Karo Batak|
bua bxr|Cyrl|Buryat/Buriat|буряад
ca cat||Catalan|català
ce che|Cyrl|Chechen|нохчийн
ceb||Cebuano|Sinugboanon
cgg||Chiga/Kiga/Rukiga|
ch cha||Chamorro|
chk||Chuukese|
chm mhr|Cyrl|Mari/Meadow Mari|
chr|Cher|Cherokee|ᏣᎳᎩ
ckb|Arab|Central Kurdish/Sorani/Sorani Kurdish/Kurdish (Sorani)/Kurdish (Central)|کوردیی ناوەندی/کوردی/سۆرانی
cnh||Hakha Chin|Laiholh
cnr||Montenegrin|crnogorski
co cos||Corsican|corsu
cr cre cwd|Cans|Cree|
crh|Cyrl|Crimean Tatar|
crs||Seychellois Creole/Seselwa Creole French|
cs cz ces cze||Czech|čeština
cv chv|Cyrl|Chuvash|чӑваш чӗлхи
cy cym wel||Welsh|Cymraeg
da dk dan||Danish|dansk
de deu ger||German|Deutsch
din dik||Dinka|
doi dgo|Deva|Dogri|डोगरी
dov||Dombe|
dsb||Lower Sorbian|dolnoserbšćina
dv div|Thaa|Dhivehi/Divehi/Maldivian|ދިވެހިބަސް
dyu||Dyula|
dz adp dzo|Tibt|Dzongkha|རྫོང་ཁ
ee ewe||Ewe|eʋegbe
el gr ell gre|Grek|Greek/Modern Greek|Ελληνικά
en eng||English|
eo epo||Esperanto|
es spa||Spanish/Castilian|español
et ekk est||Estonian|eesti/eesti keel
eu baq eus||Basque|euskara
fa fas per pes|Arab|Persian/Farsi|فارسی
ff fuc ful||Fulani/Fula/Fulah|Pulaar
fi fin||Finnish|suomi/suomen kieli
fil tl tgl||Filipino/Tagalog|
fj fij||Fijian|
fo fao||Faroese|føroyskt
fon||Fon|
fr fra fre||French|français
frr||Northern Frisian|Nordfriisk
fur||Friulian|furlan
fy fry||Frisian/Western Frisian/West Frisian|Frysk
ga gle||Irish|Gaeilge
gaa||Ga|
gd gla||Scottish Gaelic/Gaelic/Scots Gaelic|Gàidhlig
gl glg||Galician|galego
gn grn gug||Guarani|avañe’ẽ
gsw||Swiss German|Schwiizertüütsch
gu guj prp|Gujr|Gujarati|ગુજરાતી
gv glv||Manx|Gaelg
ha hau||Hausa|
hak|Hans|Hakka Chinese/Hakka|客家話/客家话
haw||Hawaiian|ʻŌlelo Hawaiʻi
he iw heb|Hebr|Hebrew|עברית
hi hin|Deva|Hindi|हिन्दी
hil||Hiligaynon/Ilonggo|
hmn hea||Hmong|
hne|Deva|Chhattisgarhi|
ho hmo||Hiri Motu|
hr hrv scr||Croatian|hrvatski/hrvatski jezik
hrx||Hunsrik|Hunsrückisch
hsb||Upper Sorbian|hornjoserbšćina
ht hat||Haitian Creole/Haitian|Kreyòl Ayisyen/Kreyòl
hu hun||Hungarian|magyar
hy arm hye|Armn|Armenian|հայերեն
hz her||Herero|
ia ina||Interlingua|
iba blg snb||Iban|
id in ind||Indonesian|Indonesia/Bahasa Indonesia
ie ile||Interlingue|
ig ibo||Igbo|Asụsụ Igbo
ii iii|Yiii|Nuosu/Sichuan Yi|ꆈꌠꉙ
ik esk ipk||Inupiaq|
ikt||Inuinnaqtun/Western Canadian Inuktitut|
ilo||Ilocano/Iloko|Ilokano
io ido||Ido|
is ice isl||Icelandic|íslenska
it ita||Italian|italiano
iu ike iku|Cans|Inuktitut|ᐃᓄᒃᑎᑐᑦ
ja jp jpn|Jpan|Japanese|日本語
jam||Jamaican Patois/Jamaican Creole English/Jamaican Creole|
jv jw jav||Javanese|Jawa/basa Jawa
ka geo kat|Geor|Georgian|ქართული/ქართული ენა
kab||Kabyle|Taqbaylit
kac||Jingpo/Kachin|
kek||Qʼeqchiʼ|
kg kng kon||Kongo/Kikongo|
kha||Khasi|
ki kik||Kikuyu|Gĩgĩkũyũ
kj kua||Kuanyama|
kk kaz|Cyrl|Kazakh|қазақ тілі/қазақша/қазақ
kl kal||Greenlandic/Kalaallisut|
km khm|Khmr|Khmer|ខ្មែរ/ភាសាខ្មែរ
kn kan|Knda|Kannada|ಕನ್ನಡ
ko kor|Kore|Korean|한국어/한국말/조선말
kok gom|Deva|Konkani/Goan Konkani|कोंकणी
kr kau knc||Kanuri|
kri||Krio|
ks kas|Arab|Kashmiri|کٲشُر
ksh||Colognian|Kölsch
ktu||Kituba|
ku kmr kur||Kurdish/Kurmanji/Kurdish (Kurmanji)/Northern Kurdish/Kurmanji Kurdish|kurdî (kurmancî)
kv kom kpv|Cyrl|Komi|
kw cor||Cornish|kernewek
ky kir|Cyrl|Kyrgyz/Kirghiz|кыргызча
la lat||Latin|Latina
lad|Hebr|Ladino|
lb ltz||Luxembourgish|Lëtzebuergesch
lg lug||Luganda/Ganda|
li lim||Limburgish/Limburgan|
lij||Ligurian|ligure
lmo||Lombard|
ln lin||Lingala|
lo lao|Laoo|Lao|ລາວ/ພາສາລາວ
lt lit||Lithuanian|lietuvių/lietuvių kalba
ltg||Latgalian|latgalīšu
lu lub||Luba-Katanga|Tshiluba
luo||Luo|Dholuo
lus||Mizo|
lv lav lvs||Latvian|latviešu/latviešu valoda
lzh wyw zh-classical zh-wyw|Hant|Classical Chinese/Literary Chinese|文言文/文言
mad||Madurese|
mai|Deva|Maithili|मैथिली
mak||Makassar/Makasar|
mfe||Mauritian Creole/Morisyen|kreol morisien
mg mlg plt||Malagasy|
mh mah||Marshallese|
mi mao mri||Maori|te reo Māori
min||Minangkabau|
mk mac mkd|Cyrl|Macedonian|македонски/македонски јазик
ml mal|Mlym|Malayalam|മലയാളം
mn drh khk mon|Cyrl|Mongolian|монгол/монгол хэл
mni|Beng|Meitei/Manipuri/Meiteilon|মৈতৈলোন্
mr mar|Deva|Marathi|मराठी
ms may msa zsm||Malay|Melayu/Bahasa Melayu
mt mlt||Maltese|Malti
mwr dhd|Deva|Marwari|
mww||Hmong Daw/White Hmong|
my bur mya|Mymr|Burmese/Myanmar|မြန်မာ/မြန်မာဘာသာ
na nau||Nauruan/Nauru|
nan zh-min-nan|Hans|Min Nan Chinese/Min Nan/Hokkien/Taiwanese Hokkien|閩南語/闽南语/臺語/台語
nap||Neapolitan|
nb no nor nob||Norwegian/Norwegian Bokmål/Bokmål|norsk bokmål/norsk
nd nde||North Ndebele/Northern Ndebele|isiNdebele
ndc||Ndau|
nds||Low German|Neddersass’sch
ne nep npi|Deva|Nepali|नेपाली
new|Deva|Newar/Newari/Nepalbhasa|
ng ndo||Ndonga|
nhe||Nahuatl/Eastern Huasteca Nahuatl|
nl dut nld||Dutch|Nederlands
nn nno||Norwegian Nynorsk/Nynorsk|norsk nynorsk
nr nbl||South Ndebele/Southern Ndebele|
nso||Northern Sotho/Sepedi|Sesotho sa Leboa
nus||Nuer|Thok Nath
nv nav||Navajo/Navaho|Diné Bizaad
ny nya||Chichewa/Nyanja/Chewa|
oc oci||Occitan|
oj ojg oji|Cans|Ojibwe/Ojibwa|
om gaz orm||Oromo|Oromoo
or ori ory|Orya|Odia/Oriya|ଓଡ଼ିଆ
os oss|Cyrl|Ossetian/Ossetic|ирон
otq||Querétaro Otomi/Otomi|
pa pan|Guru|Punjabi/Panjabi|ਪੰਜਾਬੀ
pag||Pangasinan|
pam||Kapampangan/Pampanga|
pap||Papiamento/Papiamentu|
pi pli||Pali|
pl pol||Polish|polski
pms||Piedmontese|piemontèis
prs|Arab|Dari/Afghan Persian/Persian (Afghanistan)|دری
ps pbu pus|Arab|Pashto/Pushto|پښتو
pt por||Portuguese|português
qu que quz||Quechua|Runasimi
rm roh||Romansh|rumantsch
rn run||Kirundi/Rundi|Ikirundi
ro mo mol ron rum||Romanian/Moldovan|română
rom rmy||Romani/Romany|
ru rus|Cyrl|Russian|русский/русский язык
rue|Cyrl|Rusyn|
rw kin||Kinyarwanda|Ikinyarwanda
sa cls san|Deva|Sanskrit|संस्कृत भाषा
sah|Cyrl|Yakut/Sakha|саха тыла/саха
sat|Olck|Santali|ᱥᱟᱱᱛᱟᱲᱤ
sc src srd||Sardinian|sardu
scn||Sicilian|sicilianu
sco||Scots|
sd snd|Arab|Sindhi|سنڌي
se sme||Northern Sami|davvisámegiella
sg sag||Sango|
sh hbs||Serbo-Croatian|srpskohrvatski
shn|Mymr|Shan|တႆး
si sin|Sinh|Sinhala/Sinhalese|සිංහල
sk slk slo||Slovak|slovenčina
sl slv||Slovenian|slovenščina
sm smo||Samoan|gagana Sāmoa
sn sna||Shona|chiShona
so som||Somali|Soomaali
sq alb als sqi||Albanian|shqip/gjuha shqipe
sr scc srp|Cyrl|Serbian|српски/српски језик
ss ssw||Swati/Swazi|siSwati
st sot||Sesotho/Southern Sotho|
su sun||Sundanese|Basa Sunda
sus||Susu|
sv swe||Swedish|svenska
sw swa swh||Swahili|Kiswahili
szl||Silesian|ślōnski
ta tam|Taml|Tamil|தமிழ்
tcy|Knda|Tulu|
te tel|Telu|Telugu|తెలుగు
tet||Tetum|
tg tgk|Cyrl|Tajik|тоҷикӣ
th tha|Thai|Thai|ไทย/ภาษาไทย
ti tir|Ethi|Tigrinya|ትግርኛ
tiv||Tiv|
tk tuk||Turkmen|türkmen dili/türkmençe
tlh||Klingon|
tn tsn||Tswana|Setswana
to ton||Tongan|lea fakatonga
tpi||Tok Pisin|
tr tur||Turkish|Türkçe
trp||Kokborok|
ts tso||Tsonga|Xitsonga
tt tat|Cyrl|Tatar|татар/татарча
tum||Tumbuka|
tw twi||Twi|
ty tah||Tahitian|
tyv|Cyrl|Tuvan/Tuvinian|Тыва
tzm||Central Atlas Tamazight|Tamaziɣt n laṭlaṣ
udm|Cyrl|Udmurt|
ug uig|Arab|Uyghur/Uighur|ئۇيغۇرچە/ئۇيغۇر
uk ua ukr|Cyrl|Ukrainian|українська/українська мова
ur urd|Arab|Urdu|اردو
uz uzb uzn||Uzbek|o‘zbek/oʻzbekcha
ve ven||Venda|Tshivenḓa
vec||Venetian|veneto
vi vie||Vietnamese|Tiếng Việt/Việt
vo vol||Volapük|
wa wln||Walloon|walon
war||Waray|Winaray
wo wol||Wolof|
wuu|Hans|Wu Chinese/Wu/Shanghainese|吴语/吳語
xh xho||Xhosa|IsiXhosa
yi ji ydd yid|Hebr|Yiddish|ייִדיש
yo yor||Yoruba|Èdè Yorùbá
yua||Yucatec Maya/Yucatec|
yue zh-yue|Hant|Cantonese|粵語/粤语/廣東話/广东话
za zha zyb||Zhuang|Vahcuengh
zap zai||Zapotec|
zgh|Tfng|Standard Moroccan Tamazight/Moroccan Tamazight|ⵜⴰⵎⴰⵣⵉⵖⵜ
zh cn chi cmn zho|Hans|Chinese/Simplified Chinese/Mandarin/Mandarin Chinese|中文/简体中文/汉语/中文简体
zu zul||Zulu|isiZulu
"""
# By code and script or region: what a prompt says in place of the language's name, and other names for it.
VARIANTS = {
    "zh-Hant": "Traditional Chinese/Chinese (Taiwan)/Chinese (Hong Kong)/繁體中文/繁体中文/中文繁體/中文繁体",
    "ca-valencia": "Valencian/valencià",
    "de-AT": "Austrian German/German (Austria)",
    "de-CH": "Swiss High German/German (Switzerland)",
    "en-AU": "Australian English/English (Australia)",
    "en-CA": "Canadian English/English (Canada)",
    "en-GB": "British English/English (UK)/English (GB)/English (British)/English (United Kingdom)",
    "es-419": "Latin American Spanish/Spanish (Latin America)/Spanish (Latin American)",
    "es-MX": "Mexican Spanish/Spanish (Mexico)",
    "fa-AF": "Dari",
    "fr-CA": "Canadian French/French (Canada)",
    "fr-CH": "Swiss French/French (Switzerland)",
    "nl-BE": "Flemish/Dutch (Belgium)/Vlaams",
    "pt-BR": "Brazilian Portuguese/Portuguese (Brazil)/Portuguese (Brazilian)/português brasileiro",
    "pt-PT": "European Portuguese/Portuguese (Portugal)/Portuguese (European)/português europeu",
    "sr-ME": "Montenegrin",
}
# Codes of services, in lower case, that are those of a variety.
TAGS = {
    "chs": "zh",
    "zh-chs": "zh",
    "cht": "zh-hant",
    "zh-cht": "zh-hant",
    "zt": "zh-hant",
    "pb": "pt-br",
    "tlh-qaak": "tlh-piqd",
}
# Names of plain varieties that other services part from others.
PLAIN = {
    "en": "American English/English (US)/English (American)/English (United States)/English (USA)",
    "es": "European Spanish/Spanish (Spain)",
    "fr": "French (France)",
    "de": "German (Germany)",
    "zh": "Chinese (China)",
}
# Regions where a language is written in another script than its first one.
SCRIPT_OF_REGION = {
    "Arab": ("az-IR", "kk-CN", "ku-IQ", "ku-IR", "ky-CN", "pa-PK", "uz-AF"),
    "Deva": ("sd-IN",),
    "Hans": ("yue-CN",),
    "Hant": ("hak-TW", "nan-TW", "zh-HK", "zh-MO", "zh-TW"),
    "Mong": ("mn-CN",),
}
# Other codes of scripts are no part of a language here.
SCRIPTS = {
    "Adlm": "Adlam",
    "Arab": "Arabic",
    "Armn": "Armenian",
    "Beng": "Bengali",
    "Cans": "Canadian Aboriginal Syllabics",
    "Cher": "Cherokee",
    "Cyrl": "Cyrillic",
    "Deva": "Devanagari",
    "Ethi": "Ethiopic",
    "Geor": "Georgian",
    "Grek": "Greek",
    "Gujr": "Gujarati",
    "Guru": "Gurmukhi",
    "Hans": "Simplified",
    "Hant": "Traditional",
    "Hebr": "Hebrew",
    "Hmnp": "Nyiakeng Puachue Hmong",
    "Jpan": "Japanese",
    "Khmr": "Khmer",
    "Knda": "Kannada",
    "Kore": "Korean",
    "Laoo": "Lao",
    "Latn": "Latin",
    "Mlym": "Malayalam",
    "Mong": "Mongolian script",
    "Mtei": "Meitei Mayek",
    "Mymr": "Myanmar",
    "Nkoo": "N’Ko",
    "Olck": "Ol Chiki",
    "Orya": "Odia",
    "Piqd": "pIqaD",
    "Sinh": "Sinhala",
    "Taml": "Tamil",
    "Telu": "Telugu",
    "Tfng": "Tifinagh",
    "Thaa": "Thaana",
    "Thai": "Thai",
    "Tibt": "Tibetan",
    "Yiii": "Yi",
}
