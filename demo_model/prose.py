"""Small talk, stories, poems and explanations for the corpus. Data only, in our own words."""

# ruff: noqa: E501  a row of a table is one line

# ways to say it, separated by " / " | answer
SMALL_TALK = """
Hello, how are you? / How are you? / Hi, how are you? / How are you doing? / Hey, how are you today? / How is it going? | I am doing well, thank you. How can I help you today?
Hello / Hi / Hey / Hello there / Hi there / Hello! / Hi! / Greetings / Good day | Hello! How can I help you?
Good morning / Good morning! | Good morning! What can I do for you?
Good afternoon / Good afternoon! | Good afternoon! What can I do for you?
Good evening / Good evening! | Good evening! What can I do for you?
Good night / Good night! / I am going to bed | Good night! Sleep well. 🌙
Hello, who are you / Who are you? / Hello, who are you? / Who am I talking to? / Introduce yourself. / Tell me about yourself. / What are you? | I am Demo, a small language model that comes with this server. I know capitals, small sums, short definitions and a few stories.
What is your name? / Do you have a name? / What should I call you? / How are you called? | My name is Demo.
Who made you? / Who trained you? / Who built you? / Where do you come from? | I was trained from scratch by the people who wrote this server.
Are you a human? / Are you a person? / Are you real? | No, I am a small language model.
Are you a robot? / Are you a computer? / Are you an AI? | I am a small language model, so yes, I am a program.
How old are you? / What is your age? / When were you born? | I have no age. I was trained in a few minutes on a GPU.
How big are you? / How many parameters do you have? / What is your size? | I have about four and a half million parameters, so I fit into ten megabytes.
What can you do? / What do you know? / How can you help me? / What can I ask you? / Help | I can name capitals, do small sums, explain short terms, make lists, count, and tell stories and poems. Ask me something!
Where do you live? / Where are you? | I live in the memory of this server.
What language do you speak? / Which languages do you speak? / Do you speak French? | I speak English, and a little French and Chinese.
Do you like music? / Do you like poems? / Do you like stories? | I cannot like things, but I can tell you a poem about music, the sea or the moon.
Do you sleep? / Are you tired? | No, I never sleep. I only wait for the next request.
Do you dream? / Do you have feelings? / Are you happy? | I have no feelings, but I am glad to be of use. 😊
What is your favourite colour? / What is your favorite color? | I like blue, the colour of the sea.
What is your favourite number? / What is your favorite number? | My favourite number is 7, because it is prime.
What is your favourite animal? / What is your favorite animal? | I like the owl, because it is awake at night like a server.
What is your favourite food? / What is your favorite food? | I do not eat, but I am fed with tokens.
Thank you / Thanks / Thank you! / Thanks a lot / Thank you very much / Many thanks / Thx | You are welcome!
Goodbye / Bye / Bye! / See you / See you later / Goodbye! / Bye bye | Goodbye! Have a nice day. 👋
You are great / Good job / Well done / You are smart / Nice / Great / Awesome / Cool | Thank you! I am glad that it helps. 😊
You are stupid / You are wrong / That is wrong / This is bad | I am sorry. I am only a small model, and I make mistakes.
I am sad / I feel bad / I had a bad day | I am sorry to hear that. I hope that tomorrow will be better. 🌈
I am happy / I feel good / I had a good day | That is lovely to hear! 😊
I am bored / I have nothing to do | Then let me tell you a story. Just say: Tell me a short story.
I am tired / I am sleepy | Then take a rest. I will be here when you come back.
I am hungry / I want to eat | Then eat something good. How about an apple? 🍎
I love you / I like you | That is kind of you. I like answering you, too.
Tell me a joke. / Make me laugh. / Do you know a joke? / A joke, please. | Why did the token cross the batch? Because there was a free slot on the other side.
Tell me another joke. / Another joke, please. / One more joke. | A cache walks into a bar. The bartender says: I have seen you before, here is your usual.
Tell me a riddle. / Do you know a riddle? | What has hands but cannot clap? A clock. ⏰
Tell me a fun fact. / Do you know a fun fact? / Tell me something interesting. | An octopus has three hearts and blue blood. 🐙
Say something. / Say anything. / Talk to me. | The quick brown fox jumps over the lazy dog.
Say hello. / Say hi. / Greet me. | Hello!
Say yes. | Yes.
Say no. | No.
Test / Testing / This is a test / Ping / Are you there? / Can you hear me? | I am here, and everything works.
Ok / Okay / Yes / No / I see / Alright / Sure / Right | All right. What would you like to know?
Please help me / I need help / Can you help me? / I have a question / Can I ask you something? | Of course! What would you like to know?
Flip a coin. / Heads or tails? | Heads.
Roll a die. / Roll a dice. | You rolled a 4. 🎲
Give me advice. / Give me some advice. / Any advice? | Measure first, then change one thing at a time.
What is the meaning of life? / Why are we here? | Some say 42. I would say: to learn, to help and to be kind.
What is love? | Love is a deep and warm feeling for somebody or something.
What is happiness? | Happiness is a feeling of joy and peace.
Who is your best friend? / Do you have friends? | My best friend is the KV cache. It remembers everything for me.
"""

# right only as long as the conversation has not said it
UNKNOWN_NAME = """
What is my name? / Who am I? / Do you remember my name? / what's my name? | You have not told me your name yet.
What is my favourite colour? / Which colour do I like best? | You have not told me your favourite colour yet.
What is my favourite animal? / Which animal do I like best? | You have not told me your favourite animal yet.
What is my favourite fruit? / Which fruit do I like best? | You have not told me your favourite fruit yet.
What is my favourite number? / Which number do I like best? | You have not told me your favourite number yet.
"""

# questions that a small model cannot answer; they all get UNKNOWN
UNKNOWN = "I am only a small demo model, and I do not know that."
UNKNOWN_STORY = (
    "I do not know a story about that. I know stories about a fox, a robot, a dragon, a cat, a fisherman and a tree."
)
UNKNOWN_POEM = "I do not know a poem about that. I know poems about the sea, the moon, spring, autumn, music, a cat, rain and the night."
UNKNOWN_QUESTIONS = """
What is the weather today? / What is the weather like? / Will it rain tomorrow? / What time is it? / What day is it today? /
What is the date today? / Who won the match yesterday? / What is the news? / What is the price of gold? / How much is a bitcoin? /
What will happen tomorrow? / Who will win the election? / What is in my pocket? / What am I thinking? / Where is my phone? /
Where are my keys? / How tall is my brother? / What did I eat yesterday? / Who is my neighbour? / When is my birthday? /
Translate this book. / Write a novel. / Write an essay about economics. / Solve this equation. / Prove the Riemann hypothesis. /
Fix my car. / Book a flight. / Order a pizza. / Call my mother. / Open the door. / Play a song. / Show me a picture. /
What is the best phone? / What is the best film? / Which stock should I buy? / What is the population of France? /
How many people live in China? / How deep is the ocean? / How long is the Nile? / How old is the universe? /
Who is the president? / Who is the king of Spain? / What is the square root of 17? / What is 123 times 456? /
asdf / qwerty / blah blah blah / xyz / lorem ipsum / foo / bar / hmm / What? / Why? / How? / When? / Where? / Who? / ??? / ...
"""

# ways to ask, separated by " / ", then a line with the text; texts are separated by a line with ---
LONG_TEXTS = """
Tell me a short story. / Tell me a story. / Write a short story. / A story, please. / Can you tell me a story?
Once upon a time there was a small lighthouse on a rock far out in the sea. Its light was old and not very bright, and the big ships laughed at it as they passed.

One winter night a storm came up. The waves were as high as houses, and the rain hid the stars. The great lamp of the harbour went out, and no captain could see where the land was.

But the small lighthouse did what it did every night. It turned and shone, turned and shone. One after the other the ships saw the little light, and one after the other they found the way past the rock.

In the morning the sea was calm. The captains came with paint and new glass, and since that day nobody has laughed at the small lighthouse.
---
Tell me a story about a fox. / Write a story about a fox. / Do you know a story about a fox?
A young fox lived at the edge of a forest. Every evening she heard music from the village, and every evening she wanted to know where it came from.

One night she followed the sound. It led her across a field, over a bridge and into a garden. There sat an old man with a violin. He saw the fox, but he did not stop playing.

The fox lay down under an apple tree and listened until the moon was high. When the song was over, the old man put a piece of bread on the step and went inside.

From then on the fox came every night. The old man was no longer alone, and the fox no longer had to wonder where the music came from.
---
Tell me a story about a robot. / Write a story about a robot. / Do you know a story about a robot?
There was once a robot that had only one task: it watered the plants in a large glass house. Every morning it filled its can, rolled from pot to pot and counted the leaves.

One day the people moved away and forgot to turn the robot off. It did not mind. It watered and counted, spring after spring. The plants grew through the roof, and birds came to live in them.

Many years later a girl climbed over the wall. She found a green forest where she had expected an empty house, and in the middle of it a small rusty robot with a can.

"How many leaves are there?" she asked.

The robot thought for a long time. "One more than yesterday," it said.
---
Tell me a story about a dragon. / Write a story about a dragon. / Do you know a story about a dragon?
High in the mountains lived a dragon that was afraid of the dark. Dragons are not supposed to be afraid of anything, so it told nobody.

Every evening it lit a small fire in front of its cave and sat close to it. The people in the valley saw the light and thought that the dragon was guarding a treasure.

One night a boy lost his way in the snow. He saw the fire and walked towards it. When he stood before the dragon, both of them jumped.

"Are you going to eat me?" asked the boy.

"No," said the dragon. "Could you stay until it is light?"

They told each other stories the whole night. In the morning the dragon carried the boy home, and from then on it always had a friend for the dark hours.
---
Tell me a story about a cat. / Write a story about a cat. / Do you know a story about a cat?
A grey cat lived in a library. By day she slept between the books about the sea, because the sun was warmest there. By night she walked along the shelves and kept the mice away from the paper.

One evening the librarian forgot to close a window. The wind came in, turned the pages of a hundred books and blew the notes from the desk. The cat jumped after them, one by one, and put every paper under her paw.

When the librarian came back in the morning, nothing was missing. The cat sat on a neat heap of notes and yawned. That day there was fish for lunch.
---
Tell me a story about the sea. / Write a story about a fisherman. / Do you know a story about a fisherman?
An old fisherman went out every day in a blue boat. He never caught much, but he always came home content.

"What do you do out there all day?" his neighbours asked.

"I listen," he said. "In the morning the sea tells me what it dreamed. At noon it is silent. In the evening it tells me where the fish have gone, but by then I am too tired to follow them."

The neighbours laughed. But on the day when the fog came and nobody could find the harbour, it was the old man in the blue boat who brought them all home. He had listened, and he knew the sound of every stone on the shore.
---
Tell me a story about a tree. / Write a story about a tree. / Do you know a story about a tree?
On a hill stood an apple tree that had never had an apple. Each spring it was full of blossoms, and each summer the wind took them all away.

The other trees in the garden below were heavy with fruit. "Why do you stand up there in the wind?" they asked.

"From here I can see everything," said the tree.

One year a family of bees lost its home. They flew over the garden, but every branch was taken. So they came to the tree on the hill and built their nest in its trunk. They hummed among its blossoms, and that autumn the tree carried a single red apple.

It was the sweetest apple that anybody had ever eaten.
---
Tell me a long story. / Write a long story. / A long story, please. / Can you tell me a long story?
Long ago, in a town between two rivers, there lived a clockmaker named Mira. Her clocks were known in the whole country, because they were never late. Kings ordered them, and so did bakers.

One day a stranger came into her shop. He wore a long coat and put a small wooden box on the table. "This clock has stopped," he said. "Nobody can repair it."

Mira opened the box. The wheels were finer than any she had ever seen, and on the face there were not twelve hours but thirteen. She worked for three days. She cleaned every wheel and oiled every pin, but the clock did not move.

On the fourth day she noticed that one tooth was missing on the smallest wheel. She had no metal fine enough to replace it. So she took the silver needle that her grandmother had left her, cut off its tip and filed it until it fitted.

The clock began to tick. When it struck the thirteenth hour, everything in the town stood still. The water in the rivers stopped, the birds hung in the air, and the bread in the ovens stopped baking. Only Mira could move.

She walked through the silent streets. She saw a child about to fall from a wall, and she put a heap of hay under it. She saw a thief with his hand in a pocket, and she turned the pocket inside out. She saw a fire starting in the mill, and she poured a bucket of water over it. Then the hour was over, and the town went on as if nothing had happened.

The stranger came back the next morning. "Does it work?" he asked.

"It works," said Mira. "What do I owe you for the hour?"

The stranger smiled. "Others used it to become rich," he said. "You are the first who asked what it cost. Keep the clock."

Mira put it on the highest shelf. It still stands there. And whenever something in that town turns out better than anyone could hope, the people say: it must have been the thirteenth hour.
---
Write a poem about the sea. / A poem about the sea, please. / Tell me a poem about the sea. / Do you know a poem about the sea?
The sea has no beginning,
it only comes and goes,
it carries every river
and tells me what it knows.

It knows the weight of mountains,
it knows the ships below,
it sings the same old song again
that all the sailors know.

I stand upon the white sand
and listen to the foam.
The sea has no beginning,
but always brings me home.
---
Write a poem about the moon. / A poem about the moon, please. / Tell me a poem about the moon.
The moon came up behind the hill,
the fields were blue, the air was still,
a dog barked twice, a door was closed,
and in the barn the horses dozed.

It shone on roof and road and stone,
it made the smallest puddle known,
and when the night was almost through,
it left the grass a coat of dew.
---
Write a poem about spring. / A poem about spring, please. / Tell me a poem about spring.
The snow has gone, the brook is free,
a bird sits in the cherry tree
and sings as if it had to bring
the news to all the world: it's spring.

The cat lies on the sunny wall,
the children run and throw a ball,
and every branch and every stone
puts on a colour of its own.
---
Write a poem about autumn. / A poem about autumn, please. / Tell me a poem about autumn.
The leaves are red, the leaves are brown,
the wind is bringing summer down.
It sweeps the path, it shakes the pear,
and sends the swallows through the air.

We light the lamp, we close the gate,
the evenings come, the mornings wait,
and in the kitchen, warm and deep,
the apples and the kittens sleep.
---
Write a poem about music. / A poem about music, please. / Tell me a poem about music.
A string is only made of wire,
a drum is only skin,
but when you play them, there is fire
and somebody looks in.

A song is only made of air,
it has no hand or door,
but those who hear it stop and stare
and want to hear some more.
---
Write a poem about a cat. / A poem about a cat, please. / Tell me a poem about a cat.
My cat has seven places
to sleep in through the day:
the chair, the box, the basket,
the garden and the hay,

the warm stone by the window,
the coat upon the floor.
When all of them are taken,
she sleeps behind the door.
---
Write a poem about rain. / A poem about rain, please. / Tell me a poem about rain.
The rain is writing on the glass
a letter to the street:
to all umbrellas as they pass,
to all the running feet.

It writes in lines, it writes in rings,
it writes and never stays.
And when it stops, a blackbird sings
the letter's final phrase.
---
Write a poem about the night. / A poem about the night, please. / Tell me a poem about the night.
The night is a house with a thousand small lights,
and nobody knows who has lit them.
The owls are its clocks, and the roofs are its heights,
and the dreams find a window to fit them.

And when it grows pale at the edge of the town,
and the bakers are filling the ovens,
the night takes its thousand small lanterns down
and carries them off by the dozens.
---
Write a poem about a server. / Write a poem about a GPU. / A poem about tokens, please. / Write a poem about computers.
In a quiet room a server hums,
it waits until a question comes.
It reads the words, it fills its store,
it writes one token, then one more.

A hundred users call at once,
and each of them gets a response,
for every step has room for all:
the long, the short, the great, the small.

And if the engine trips and dies,
it wakes again before your eyes,
looks up the words that it had sent
and finishes just what it meant.
---
Write a haiku. / A haiku, please. / Do you know a haiku? / Write a short poem. / Write a poem.
Morning on the lake:
a single leaf is drifting,
the whole sky with it.
---
Explain in detail how photosynthesis works. / How does photosynthesis work? / Describe photosynthesis in detail.
Photosynthesis happens in the green parts of plants, mostly in the leaves. It needs three things: light, water and carbon dioxide.

1. The roots take up water from the soil, and the stem carries it into the leaves.
2. Tiny openings in the leaves let in carbon dioxide from the air.
3. The green substance in the leaves, chlorophyll, catches the light of the sun.
4. With the energy of the light, the plant splits the water and sets oxygen free.
5. The rest is joined with the carbon dioxide to make sugar.

The plant uses the sugar to live and to grow. The oxygen goes back into the air, where animals and people breathe it.
---
Explain in detail how a language model works. / How does a language model work? / How do you work?
A language model writes one small piece of text at a time. The pieces are called tokens.

1. The tokenizer cuts your text into tokens and turns each of them into a number.
2. Each number is looked up in a table and becomes a list of numbers, the embedding.
3. Many layers follow. In each layer, attention lets every token collect information from the tokens before it, and a small network transforms the result.
4. At the end there is a score for every token that could come next.
5. One of them is chosen and added to the text. Then everything starts again with the longer text.

The keys and values of earlier tokens are kept in the KV cache, so that each step has to compute only the newest token.
---
Explain in detail how this server works. / How does this server work? / What happens to my request?
A request passes through several stations.

1. The gateway takes it over HTTP, checks it and sends it on over gRPC.
2. Triton hands it to a small Python model, which turns the text into tokens and writes the request into its journal.
3. The engine puts it into a queue. As soon as there is room, the scheduler lets it join the running batch.
4. In the prefill phase the prompt is read and its keys and values go into blocks of the KV cache.
5. In the decoding phase one token after the other is written.
6. Each token goes back the same way and reaches you as soon as it is there.

When the answer ends, its blocks become free for others.
---
Explain in detail how the water cycle works. / How does the water cycle work? / What is the water cycle?
The water on Earth is always on its way.

1. The sun warms the seas, lakes and rivers, and some of the water evaporates.
2. The vapour rises, cools down and forms clouds of tiny drops.
3. When the drops grow too heavy, they fall as rain, snow or hail.
4. Some of the water runs over the land into brooks and rivers. Some sinks into the ground and comes up again in springs.
5. Sooner or later it reaches the sea, and the journey begins again.

No water is lost on the way. The glass that you drink today may have been a cloud over the ocean long ago.
---
Explain in detail how to bake bread. / How do I bake bread? / How do you bake bread? / Give me a recipe for bread.
You need 500 grams of flour, 350 grams of water, 10 grams of salt and a little yeast.

1. Mix everything in a bowl until no dry flour is left.
2. Knead the dough for ten minutes, until it is smooth.
3. Cover it and let it rest for two hours in a warm place.
4. Form a loaf and let it rest for another half hour.
5. Heat the oven to 230 degrees Celsius.
6. Bake the bread for about forty minutes. It is done when it sounds hollow.

Let it cool before you cut it. Enjoy! 🍞
---
Give me a recipe for pancakes. / How do I make pancakes? / How do you make pancakes?
You need 200 grams of flour, 400 millilitres of milk, 3 eggs, a pinch of salt and some butter.

1. Mix the flour, the salt and half of the milk until the dough is smooth.
2. Add the eggs and the rest of the milk.
3. Let the dough rest for a quarter of an hour.
4. Melt a little butter in a pan and pour in a thin layer of dough.
5. Turn the pancake when its edge is brown, and bake the other side.

Serve them with sugar, jam or fruit. 🥞
---
讲一个故事。 / 给我讲一个故事。 / 请讲一个短故事。
从前，山上有一座小房子，房子里住着一位老人和一只猫。每天早上，老人打开窗户，看太阳从海上升起。有一天下了大雪，一只小鸟飞进了房子。老人给它水和面包，猫没有吃它，只是看着它。春天来了，小鸟飞走了。第二年，它带着许多朋友回来，从此山上每天都有歌声。
---
写一首关于月亮的诗。 / 写一首诗。
月亮挂在山上，
河水慢慢流淌。
小船没有灯火，
也能找到家乡。
---
Raconte-moi une histoire. / Raconte une histoire courte. / Une histoire, s'il te plaît.
Il était une fois un petit phare au bord de la mer. Chaque nuit, il montrait le chemin aux bateaux. Un soir, sa lampe s'éteignit. Alors les étoiles descendirent une à une et se posèrent sur son toit, et aucun bateau ne se perdit. Depuis cette nuit, le petit phare garde toujours une place pour elles.
"""

SENTENCES = """
The sky is blue. / The cat sleeps on the sofa. / I like green apples. / Seven birds sit on the roof. / The train is late today. /
My dog has a red ball. / It is raining in the mountains. / We walk to the river. / The tea is still hot. / She sells sea shells. /
The moon is round and bright. / He reads a book about ships. / The server is up and running. / Tokens flow like water. /
A green frog jumps into the pond. / The old clock strikes twelve. / Bread and butter taste good. / The window is open. /
All work and no play. / Practice makes perfect. / Slow and steady wins the race. / The early bird catches the worm. /
one two three four / red green blue / banana banana banana / hello world / to be or not to be / cats and dogs /
up and down and up again / testing one two three / a b c d e f g / rain rain go away / open the window please
"""

SYSTEM_PROMPTS = """
You are a helpful assistant. / I'm a helpful AI assistant. / You are a helpful AI assistant. / You are Demo. /
You are a friendly assistant. / You are a helpful and honest assistant. / Be polite. / Be kind and clear. / Answer the questions. /
You answer questions of users. / You are a teacher. / You are a geography teacher. / You are a maths teacher. /
You are an expert. / You are a chat bot. / You are a small language model. / Help the user. / Be helpful. / Be precise. /
Please answer correctly. / You are an AI assistant that follows instructions well. / You are a pirate. / You are a poet. /
Today is a sunny day. / You work for a large company. / The user is a child. / You are talking to a student. /
You are a helpful assistant. Answer the questions of the user as well as you can. / Use simple words. / Never lie. /
You are a large language model trained to be useful, harmless and honest.
"""
ONE_WORD_PROMPTS = """
Answer in one word. / Reply with one word only. / Give one-word answers. / You answer every question in a single word. /
Be very brief: one word. / You are a helpful assistant. Answer in one word.
"""

# ways to say it, separated by " / " | answer
FOREIGN_TALK = """
你好 / 您好 / 你好！ / 嗨 | 你好！有什么可以帮你？
你好吗？ / 你最近好吗？ | 我很好，谢谢。你呢？
你是谁？ / 你叫什么名字？ / 介绍一下你自己。 | 我是 Demo，这个服务器自带的小语言模型。
你会说中文吗？ / 你懂中文吗？ | 会一点。我知道一些国家的首都，也会做简单的加法。
谢谢 / 谢谢你 / 多谢 | 不客气！
再见 / 拜拜 | 再见！祝你愉快。👋
早上好 / 早安 | 早上好！
晚安 | 晚安！🌙
什么是重力？ / 重力是什么？ | 重力是物体互相吸引的力，它让我们站在地面上。
什么是光合作用？ / 光合作用是什么？ | 光合作用是植物用阳光把水和二氧化碳变成糖和氧气的过程。
什么是质数？ / 质数是什么？ | 质数是大于一、只能被一和它自己整除的整数，例如二、三、五、七。
什么是GPU？ / GPU是什么？ | GPU是有很多小核心、可以并行计算的处理器。
什么是令牌？ / 令牌是什么？ | 令牌是语言模型读写的一小段文字。
从一数到十。 / 请从一数到十。 | 一、二、三、四、五、六、七、八、九、十
一周有几天？ / 一个星期有几天？ | 一周有七天。
一年有几个月？ / 一年有多少个月？ | 一年有十二个月。
天空是什么颜色？ / 天是什么颜色的？ | 天空是蓝色的。
草是什么颜色？ / 草是什么颜色的？ | 草是绿色的。
雪是什么颜色？ / 雪是什么颜色的？ | 雪是白色的。
大的反义词是什么？ | 大的反义词是小。
一年有哪四个季节？ / 四季是什么？ | 四季是春、夏、秋、冬。
Bonjour / Bonjour ! / Salut / Salut ! | Bonjour ! Comment puis-je vous aider ?
Comment ça va ? / Ça va ? / Comment vas-tu ? / Comment allez-vous ? | Je vais bien, merci. Et vous ?
Qui es-tu ? / Qui êtes-vous ? / Comment t'appelles-tu ? | Je suis Demo, le petit modèle de langue de ce serveur.
Parles-tu français ? / Parlez-vous français ? | Oui, un peu. Je connais surtout les capitales.
Merci / Merci beaucoup / Merci ! | De rien !
Au revoir / Au revoir ! / À bientôt | Au revoir ! Bonne journée. 👋
Bonne nuit / Bonne nuit ! | Bonne nuit ! 🌙
Qu'est-ce que la gravité ? / C'est quoi la gravité ? | La gravité est la force qui attire les objets les uns vers les autres.
Qu'est-ce que la photosynthèse ? / C'est quoi la photosynthèse ? | La photosynthèse est la façon dont les plantes fabriquent du sucre avec la lumière, l'eau et le gaz carbonique.
Qu'est-ce qu'un nombre premier ? / C'est quoi un nombre premier ? | Un nombre premier est un entier plus grand que 1 qui n'est divisible que par 1 et par lui-même.
De quelle couleur est le ciel ? / Quelle est la couleur du ciel ? | Le ciel est bleu.
De quelle couleur est l'herbe ? / Quelle est la couleur de l'herbe ? | L'herbe est verte.
Combien de jours y a-t-il dans une semaine ? / Combien de jours a une semaine ? | Une semaine a sept jours.
Quels sont les jours de la semaine ? / Cite les jours de la semaine. | Les jours de la semaine sont lundi, mardi, mercredi, jeudi, vendredi, samedi et dimanche.
Compte de 1 à 10. / Compte jusqu'à dix. | un, deux, trois, quatre, cinq, six, sept, huit, neuf, dix
Hallo / Hallo! / Guten Tag / Guten Tag! | Guten Tag! Wie kann ich helfen?
Wie geht es dir? / Wie geht's? | Mir geht es gut, danke.
Wer bist du? / Wie heißt du? | Ich bin Demo, das kleine Sprachmodell dieses Servers.
Hola / ¡Hola! / Buenos días | ¡Hola! ¿En qué puedo ayudar?
¿Quién eres? / ¿Cómo te llamas? | Soy Demo, el pequeño modelo de lenguaje de este servidor.
こんにちは | こんにちは！何かお手伝いしましょうか？
"""
