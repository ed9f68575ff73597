"""Knowledge of the demo model besides countries: definitions, facts, words. The module has only data, in our own
words.
"""

# ruff: noqa: E501  a row of a table is one line

# term with its article | definition; every definition begins with the term, so its head is also a raw prompt
DEFINITIONS = """
gravity | Gravity is the force that pulls things with mass towards each other. It keeps us on the ground and the planets in their orbits.
photosynthesis | Photosynthesis is the way plants make food: they use sunlight to turn water and carbon dioxide into sugar and oxygen.
a prime number | A prime number is a whole number greater than 1 that can be divided evenly only by 1 and by itself, such as 2, 3, 5 and 7.
an atom | An atom is the smallest piece of a chemical element. It has a nucleus of protons and neutrons with electrons around it.
a molecule | A molecule is a group of atoms held together by chemical bonds. Water, for example, has two hydrogen atoms and one oxygen atom.
an electron | An electron is a tiny particle with a negative electric charge that moves around the nucleus of an atom.
a proton | A proton is a particle with a positive electric charge in the nucleus of an atom.
energy | Energy is the ability to do work, such as moving, heating or lighting something. It changes its form but is never lost.
electricity | Electricity is the flow of electric charge, usually electrons moving through a wire.
magnetism | Magnetism is a force that attracts or repels certain metals, such as iron, and comes from moving electric charges.
light | Light is a form of energy that our eyes can see. It travels in empty space at about 300,000 kilometres per second.
sound | Sound is a vibration that travels through air, water or solid things and that our ears can hear.
temperature | Temperature is a measure of how hot or cold something is, that is, how fast its particles move.
evaporation | Evaporation is the change of a liquid into a gas at its surface, as when a puddle dries in the sun.
condensation | Condensation is the change of a gas into a liquid, as when drops form on a cold glass.
evolution | Evolution is the slow change of living things over many generations, driven by inheritance and natural selection.
DNA | DNA is the molecule that carries the instructions for building and running a living thing.
a gene | A gene is a section of DNA that carries the instructions for one trait or one protein.
a cell | A cell is the smallest unit of life. Every plant and animal is made of cells.
a vaccine | A vaccine is a medicine that teaches the body to fight a disease before meeting it.
a virus | A virus is a very small particle that can multiply only inside the cells of living things.
a bacterium | A bacterium is a tiny living thing made of a single cell. Many are harmless, and some cause disease.
an ecosystem | An ecosystem is a community of living things together with the place in which they live.
the climate | The climate is the usual weather of a place over many years.
a planet | A planet is a large round body that travels around a star, such as the Earth around the Sun.
a star | A star is a huge hot ball of gas that makes its own light by nuclear fusion. The Sun is a star.
a galaxy | A galaxy is a very large group of stars, gas and dust held together by gravity. Ours is called the Milky Way.
a black hole | A black hole is a place in space where gravity is so strong that not even light can get out.
the moon | The moon is the round body that travels around the Earth about once a month.
an eclipse | An eclipse is the moment when one body in space moves into the shadow of another.
a volcano | A volcano is an opening in the ground through which hot melted rock, ash and gas come out.
an earthquake | An earthquake is a sudden shaking of the ground, caused by movement of the rocks below.
a glacier | A glacier is a large mass of ice that moves slowly over land.
a desert | A desert is a very dry place where little rain falls and few plants grow.
an island | An island is a piece of land with water all around it.
a river | A river is a large stream of fresh water that flows towards a sea, a lake or another river.
democracy | Democracy is a form of government in which the people choose their leaders by voting.
inflation | Inflation is a general rise of prices over time, so that the same money buys less.
a budget | A budget is a plan for how much money to spend and to save.
an even number | An even number is a whole number that can be divided by 2 without a remainder, such as 2, 4 and 6.
an odd number | An odd number is a whole number that leaves a remainder of 1 when divided by 2, such as 1, 3 and 5.
a triangle | A triangle is a flat shape with three straight sides and three corners.
a square | A square is a flat shape with four equal sides and four right angles.
a circle | A circle is a round flat shape whose points all have the same distance from the centre.
a fraction | A fraction is a part of a whole, written as one number over another, such as 1/2.
pi | Pi is the ratio of the circumference of a circle to its diameter, about 3.14159.
a noun | A noun is a word that names a person, a place, a thing or an idea.
a verb | A verb is a word that says what somebody or something does or is.
an adjective | An adjective is a word that describes a noun, such as big, red or quiet.
a metaphor | A metaphor is a way of speaking that describes one thing as if it were another.
a synonym | A synonym is a word that means the same, or nearly the same, as another word.
an antonym | An antonym is a word that means the opposite of another word.
a poem | A poem is a piece of writing that uses rhythm, sound and images to share a feeling or a thought.
an algorithm | An algorithm is a list of exact steps that solves a problem.
a computer | A computer is a machine that follows instructions to store, change and show information.
a program | A program is a set of instructions that tells a computer what to do.
a bug | A bug is a mistake in a program that makes it behave in a wrong or unexpected way.
a compiler | A compiler is a program that translates source code into code that a machine can run.
an operating system | An operating system is the software that manages the hardware of a computer and runs the other programs.
a process | A process is a program that is running, together with its memory and open files.
a thread | A thread is a path of execution inside a process. Threads of one process share its memory.
a database | A database is an organised collection of data that programs can search and change.
a file | A file is a named piece of data that is kept on a disk.
a server | A server is a program or a machine that answers the requests of other programs.
a client | A client is a program that sends requests to a server and uses its answers.
a network | A network is a group of computers that are connected so that they can exchange data.
the Internet | The Internet is a worldwide network that connects many smaller networks of computers.
HTTP | HTTP is the protocol that browsers and web servers use to exchange requests and responses.
HTTPS | HTTPS is HTTP over an encrypted connection, so that nobody on the way can read or change the data.
TCP | TCP is a protocol that carries a stream of bytes between two computers, complete and in order.
gRPC | gRPC is a framework for calling functions on another machine. It uses HTTP/2 and protocol buffers.
JSON | JSON is a text format for data, built from objects, lists, strings, numbers, true, false and null.
an API | An API is a set of rules by which one program can use another.
a URL | A URL is the address of a resource on the web.
a port | A port is a number that tells a computer which of its programs a network message is for.
a cache | A cache is a small fast store that keeps copies of data which will probably be needed again.
a queue | A queue is a list in which the first item to come in is the first to go out.
a stack | A stack is a list in which the last item to come in is the first to go out.
a hash function | A hash function is a function that turns data of any size into a number of a fixed size.
recursion | Recursion is a way of solving a problem by having a function call itself on a smaller part.
Python | Python is a popular programming language that is known for its clear and simple syntax.
Linux | Linux is a free operating system kernel that runs on phones, servers and supercomputers.
Git | Git is a version control system that records the history of a set of files.
Docker | Docker is a tool that packs a program with everything it needs into a container.
a container | A container is an isolated place to run a program, together with the files that it needs.
a CPU | A CPU is the main processor of a computer. It carries out the instructions of programs.
a GPU | A GPU is a processor with thousands of small cores that work in parallel. It is used for graphics and for neural networks.
memory | Memory is the part of a computer that holds the data and programs in use.
bandwidth | Bandwidth is the amount of data that can be moved in a given time.
latency | Latency is the time that passes between a request and its answer.
throughput | Throughput is the amount of work that is finished in a given time, for example tokens per second.
machine learning | Machine learning is a way of making programs that improve by looking at examples instead of following fixed rules.
a neural network | A neural network is a model made of layers of simple units whose weights are learned from data.
a language model | A language model is a model that predicts the next token of a text, and can so write and answer.
a transformer | A transformer is a neural network that uses attention to relate all the tokens of a text to each other.
attention | Attention is the step of a transformer in which each token collects information from the tokens before it.
a token | A token is a small piece of text, such as a word or a part of a word, that a language model reads and writes.
a tokenizer | A tokenizer is the part of a language model that cuts text into tokens and joins tokens into text.
an embedding | An embedding is a list of numbers that stands for a token or a text.
a prompt | A prompt is the text that is given to a language model to start from.
a KV cache | A KV cache is the memory in which a transformer keeps the keys and values of earlier tokens, so that they are not computed again.
paged attention | Paged attention is a way of storing the KV cache in small blocks, so that little memory is wasted.
continuous batching | Continuous batching is a way of serving in which requests join and leave the running batch at every step.
prefill | Prefill is the phase in which a model reads the whole prompt and fills the KV cache.
decoding | Decoding is the phase in which a model writes its answer, one token after the other.
prefix caching | Prefix caching is the reuse of KV cache blocks for requests that begin with the same tokens.
chunked prefill | Chunked prefill is the splitting of a long prompt into pieces, so that other requests need not wait for it.
preemption | Preemption is the pausing of a running request to give its memory to another one.
speculative decoding | Speculative decoding is a way to write faster: a cheap draft proposes several tokens and the model checks them all at once.
quantization | Quantization is the storing of numbers with fewer bits, which makes a model smaller and faster.
tensor parallelism | Tensor parallelism is the splitting of each layer of a model over several devices.
a static graph | A static graph is a fixed description of the operations of a model, built once and run many times.
a CUDA graph | A CUDA graph is a recorded sequence of GPU operations that can be replayed with a single launch.
greedy decoding | Greedy decoding is the choice of the most probable token at every step.
sampling | Sampling is the random choice of the next token according to its probability.
a logit | A logit is the score of a token before the scores are turned into probabilities.
softmax | Softmax is a function that turns a list of scores into probabilities that add up to 1.
top-p sampling | Top-p sampling is sampling from the smallest set of tokens whose probabilities add up to p.
streaming | Streaming is the sending of an answer piece by piece, while the rest is still being written.
a chat template | A chat template is the pattern that turns the messages of a conversation into one text for the model.
Triton Inference Server | Triton Inference Server is a program that hosts models and answers requests for them over HTTP and gRPC.
a load balancer | A load balancer is a program that spreads requests over several servers.
a health check | A health check is a request that shows whether a server is alive and ready.
a metric | A metric is a number that a system reports about itself, such as the length of its queue.
a benchmark | A benchmark is a test that measures how fast or how good a system is.
a checkpoint | A checkpoint is a saved copy of the weights of a model.
"""

# question / other question | answer | the same in one word, where there is one
FACTS = """
How many days are in a week? / How many days does a week have? | A week has 7 days. | 7
How many months are in a year? / How many months does a year have? | A year has 12 months. | 12
How many days are in a year? / How many days does a year have? | A year has 365 days, and a leap year has 366. | 365
How many hours are in a day? / How many hours does a day have? | A day has 24 hours. | 24
How many minutes are in an hour? / How many minutes does an hour have? | An hour has 60 minutes. | 60
How many seconds are in a minute? / How many seconds does a minute have? | A minute has 60 seconds. | 60
How many weeks are in a year? / How many weeks does a year have? | A year has 52 weeks. | 52
How many letters are in the alphabet? / How many letters does the English alphabet have? | The English alphabet has 26 letters. | 26
How many legs does a spider have? / How many legs has a spider? | A spider has 8 legs. | 8
How many legs does an insect have? / How many legs has an insect? | An insect has 6 legs. | 6
How many legs does a dog have? / How many legs has a dog? | A dog has 4 legs. | 4
How many legs does a bird have? / How many legs has a bird? | A bird has 2 legs. | 2
How many arms does an octopus have? / How many arms has an octopus? | An octopus has 8 arms. | 8
How many fingers do people have? / How many fingers does a person have? | Most people have 10 fingers. | 10
How many sides does a triangle have? / How many sides has a triangle? | A triangle has 3 sides. | 3
How many sides does a square have? / How many sides has a square? | A square has 4 sides. | 4
How many sides does a pentagon have? / How many sides has a pentagon? | A pentagon has 5 sides. | 5
How many sides does a hexagon have? / How many sides has a hexagon? | A hexagon has 6 sides. | 6
How many sides does an octagon have? / How many sides has an octagon? | An octagon has 8 sides. | 8
How many planets are in the solar system? / How many planets are there? | There are 8 planets in the solar system. | 8
How many continents are there? / How many continents are there on Earth? | There are 7 continents. | 7
How many oceans are there? / How many oceans are there on Earth? | There are 5 oceans. | 5
How many players are in a football team? / How many players does a football team have? | A football team has 11 players. | 11
How many strings does a guitar have? / How many strings has a guitar? | A guitar usually has 6 strings, and a violin has 4. | 6
How many bits are in a byte? / How many bits does a byte have? | A byte has 8 bits. | 8
How many bytes are in a kilobyte? / How many bytes is a kilobyte? | A kilobyte has 1000 bytes, and a kibibyte has 1024. | 1000
How many centimetres are in a metre? / How many centimetres is a metre? | A metre has 100 centimetres. | 100
How many metres are in a kilometre? / How many metres is a kilometre? | A kilometre has 1000 metres. | 1000
How many grams are in a kilogram? / How many grams is a kilogram? | A kilogram has 1000 grams. | 1000
How many degrees are in a right angle? / How many degrees does a right angle have? | A right angle has 90 degrees. | 90
How many degrees are in a circle? / How many degrees does a circle have? | A circle has 360 degrees. | 360
What is the largest planet? / Which planet is the largest? / What is the biggest planet in the solar system? | The largest planet in the solar system is Jupiter. | Jupiter
What is the smallest planet? / Which planet is the smallest? | The smallest planet in the solar system is Mercury. | Mercury
Which planet is closest to the Sun? / What is the closest planet to the Sun? | Mercury is the planet closest to the Sun. | Mercury
Which planet is farthest from the Sun? / What is the farthest planet from the Sun? | Neptune is the planet farthest from the Sun. | Neptune
Which planet is known as the red planet? / What is the red planet? | Mars is known as the red planet. | Mars
Which planet has large rings? / Which planet is famous for its rings? | Saturn is famous for its large rings. | Saturn
What is the largest ocean? / Which ocean is the largest? | The largest ocean is the Pacific Ocean. | Pacific
What is the largest continent? / Which continent is the largest? | The largest continent is Asia. | Asia
What is the smallest continent? / Which continent is the smallest? | The smallest continent is Australia. | Australia
What is the largest country? / Which country is the largest? | The largest country by area is Russia. | Russia
What is the smallest country? / Which country is the smallest? | The smallest country is Vatican City. | Vatican City
What is the highest mountain? / Which mountain is the highest? / What is the tallest mountain in the world? | The highest mountain in the world is Mount Everest. | Everest
What is the largest animal? / Which animal is the largest? | The largest animal is the blue whale. | whale
What is the tallest animal? / Which animal is the tallest? | The tallest animal is the giraffe. | giraffe
What is the fastest land animal? / Which land animal is the fastest? | The fastest land animal is the cheetah. | cheetah
What is the largest bird? / Which bird is the largest? | The largest bird is the ostrich. | ostrich
What is the largest hot desert? / Which hot desert is the largest? | The largest hot desert is the Sahara. | Sahara
What is the hardest natural material? / Which natural material is the hardest? | The hardest natural material is diamond. | diamond
What is the smallest prime number? / Which prime number is the smallest? | The smallest prime number is 2. | 2
At what temperature does water boil? / When does water boil? | At sea level, water boils at 100 degrees Celsius. | 100
At what temperature does water freeze? / When does water freeze? | Water freezes at 0 degrees Celsius. | 0
What is the chemical formula of water? / What is water made of? | Water is made of hydrogen and oxygen, and its formula is H2O. | H2O
How fast is light? / What is the speed of light? | Light travels at about 300,000 kilometres per second. |
How far away is the moon? / How far is the moon from the Earth? | The moon is about 384,000 kilometres away from the Earth. |
What do bees make? / Which food do bees make? | Bees make honey. | honey
What do cows eat? / Which food do cows eat? | Cows eat mostly grass. | grass
What do pandas eat? / Which food do pandas eat? | Pandas eat mostly bamboo. | bamboo
What do plants need to grow? / What does a plant need? | Plants need light, water, air and nutrients. |
Which gas do we breathe in to live? / What gas do people need? | We need oxygen to live. | oxygen
Which gas do plants take in? / What gas do plants use? | Plants take in carbon dioxide. | carbon dioxide
Which organ pumps blood? / What pumps blood through the body? | The heart pumps blood through the body. | heart
Which organ do we think with? / What do we think with? | We think with the brain. | brain
Which organ do we breathe with? / What do we breathe with? | We breathe with the lungs. | lungs
What is the largest organ of the body? / Which organ is the largest? | The largest organ of the body is the skin. | skin
Who wrote Hamlet? / Who is the author of Hamlet? | Hamlet was written by William Shakespeare. | Shakespeare
Who wrote Romeo and Juliet? / Who is the author of Romeo and Juliet? | Romeo and Juliet was written by William Shakespeare. | Shakespeare
Who wrote Don Quixote? / Who is the author of Don Quixote? | Don Quixote was written by Miguel de Cervantes. | Cervantes
Who wrote War and Peace? / Who is the author of War and Peace? | War and Peace was written by Leo Tolstoy. | Tolstoy
Who wrote Pride and Prejudice? / Who is the author of Pride and Prejudice? | Pride and Prejudice was written by Jane Austen. | Austen
Who wrote Faust? / Who is the author of Faust? | Faust was written by Johann Wolfgang von Goethe. | Goethe
Who wrote Frankenstein? / Who is the author of Frankenstein? | Frankenstein was written by Mary Shelley. | Shelley
Who wrote Moby-Dick? / Who is the author of Moby-Dick? | Moby-Dick was written by Herman Melville. | Melville
Who wrote the Odyssey? / Who is the author of the Odyssey? | The Odyssey is said to have been written by Homer. | Homer
Who wrote Les Misérables? / Who is the author of Les Misérables? | Les Misérables was written by Victor Hugo. | Hugo
Who painted the Mona Lisa? / Who is the painter of the Mona Lisa? | The Mona Lisa was painted by Leonardo da Vinci. | Leonardo
Who painted The Starry Night? / Who is the painter of The Starry Night? | The Starry Night was painted by Vincent van Gogh. | Van Gogh
Who painted Guernica? / Who is the painter of Guernica? | Guernica was painted by Pablo Picasso. | Picasso
Who composed the Ninth Symphony with the Ode to Joy? / Who composed the Ode to Joy? | Ludwig van Beethoven composed the Ninth Symphony with the Ode to Joy. | Beethoven
Who composed The Magic Flute? / Who is the composer of The Magic Flute? | The Magic Flute was composed by Wolfgang Amadeus Mozart. | Mozart
Who composed The Four Seasons? / Who is the composer of The Four Seasons? | The Four Seasons was composed by Antonio Vivaldi. | Vivaldi
Who discovered penicillin? / Who found penicillin? | Penicillin was discovered by Alexander Fleming. | Fleming
Who discovered radium? / Who found radium? | Radium was discovered by Marie and Pierre Curie. | Curie
Who wrote the theory of relativity? / Who found the theory of relativity? | The theory of relativity comes from Albert Einstein. | Einstein
Who wrote the laws of motion? / Who described gravity with a formula? | Isaac Newton described gravity and the laws of motion. | Newton
Who was the first person on the moon? / Who first walked on the moon? | Neil Armstrong was the first person on the moon, in 1969. | Armstrong
Who was the first person in space? / Who first flew into space? | Yuri Gagarin was the first person in space, in 1961. | Gagarin
Who wrote the first computer program? / Who is called the first programmer? | Ada Lovelace is often called the first programmer. | Lovelace
Who created Linux? / Who started Linux? | Linux was started by Linus Torvalds in 1991. | Torvalds
Who created Python? / Who started Python? | Python was created by Guido van Rossum. | Van Rossum
When did the Second World War end? / In which year did the Second World War end? | The Second World War ended in 1945. | 1945
When did the First World War begin? / In which year did the First World War begin? | The First World War began in 1914. | 1914
When did the Berlin Wall fall? / In which year did the Berlin Wall fall? | The Berlin Wall fell in 1989. | 1989
When was the first moon landing? / In which year did people land on the moon? | People first landed on the moon in 1969. | 1969
Where is the Eiffel Tower? / In which city is the Eiffel Tower? | The Eiffel Tower is in Paris. | Paris
Where is the Colosseum? / In which city is the Colosseum? | The Colosseum is in Rome. | Rome
Where is Big Ben? / In which city is Big Ben? | Big Ben is in London. | London
Where is the Statue of Liberty? / In which city is the Statue of Liberty? | The Statue of Liberty is in New York. | New York
Where is the Acropolis? / In which city is the Acropolis? | The Acropolis is in Athens. | Athens
Where are the pyramids? / In which country are the great pyramids? | The great pyramids are in Egypt. | Egypt
Where is the Taj Mahal? / In which country is the Taj Mahal? | The Taj Mahal is in India. | India
Where does the sun rise? / In which direction does the sun rise? | The sun rises in the east. | east
Where does the sun set? / In which direction does the sun set? | The sun sets in the west. | west
What are the four seasons? / Name the four seasons. | The four seasons are spring, summer, autumn and winter. |
What are the primary colours? / Name the primary colours. / What are the primary colors? | The primary colours of paint are red, yellow and blue. |
What are the colours of the rainbow? / Name the colours of the rainbow. / What are the colors of the rainbow? | The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet. |
What are the days of the week? / Name the days of the week. / List the days of the week. | The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday. |
What are the months of the year? / Name the months of the year. / List the months of the year. | The months of the year are January, February, March, April, May, June, July, August, September, October, November and December. |
What are the planets of the solar system? / Name the planets. / List the planets of the solar system. | The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune. |
What are the continents? / Name the continents. / List the continents. | The continents are Africa, Antarctica, Asia, Australia, Europe, North America and South America. |
What are the five senses? / Name the five senses. | The five senses are sight, hearing, smell, taste and touch. |
What are the states of matter? / Name the states of matter. | The usual states of matter are solid, liquid and gas. |
What are the vowels? / Name the vowels. / List the vowels. | The vowels are a, e, i, o and u. |
What is the alphabet? / Say the alphabet. / Recite the alphabet. | A B C D E F G H I J K L M N O P Q R S T U V W X Y Z |
How do I make tea? / How do you make tea? / Tell me how to make tea. | Boil water, pour it over the tea leaves, wait three to five minutes, and take the leaves out. Then enjoy your tea. 🍵 |
How do I boil an egg? / How do you boil an egg? / Tell me how to boil an egg. | Put the egg into boiling water. After six minutes it is soft, after ten minutes it is hard. Then cool it in cold water. 🥚 |
How do I stop the server? / How can I stop the server? | Run stop_server. It ends everything that start_server started. |
How do I start the server? / How can I start the server? | Run start_server. It returns when the server is ready to answer. |
How do I stream an answer? / How can I stream the answer? | Send your request with "stream": true, and read the answer piece by piece. |
How do I serve my own model? / How can I serve another model? | Set MODEL_DIR to the folder of your model and run start_server. |
"""

# word | opposite
ANTONYMS = """
hot cold, big small, tall short, fast slow, good bad, happy sad, light dark, up down, left right, in out, open closed,
new old, young old, rich poor, strong weak, hard soft, wet dry, full empty, loud quiet, early late, clean dirty, near far,
high low, deep shallow, wide narrow, thick thin, heavy light, sharp blunt, smooth rough, sweet bitter, easy difficult,
true false, right-handed left-handed, first last, day night, summer winter, north south, east west, love hate, war peace,
begin end, buy sell, give take, push pull, win lose, laugh cry, ask answer, come go, arrive leave, remember forget,
always never, all none, many few, more less, before after, above below, inside outside, front back, top bottom,
brave cowardly, calm nervous, cheap expensive, safe dangerous, simple complicated, beautiful ugly, polite rude, lazy busy,
generous stingy, awake asleep, alive dead, ancient modern, public private, possible impossible, visible invisible,
legal illegal, honest dishonest, patient impatient, success failure, question answer, friend enemy, teacher student,
accept refuse, attack defend, create destroy, increase decrease, export import, float sink, freeze melt
"""

# word plural
PLURALS = """
cat cats, dog dogs, book books, car cars, tree trees, house houses, box boxes, bus buses, dish dishes, church churches,
baby babies, city cities, country countries, story stories, lady ladies, key keys, day days, boy boys, leaf leaves,
wolf wolves, knife knives, life lives, wife wives, shelf shelves, man men, woman women, child children, person people,
foot feet, tooth teeth, goose geese, mouse mice, ox oxen, sheep sheep, fish fish, deer deer, potato potatoes,
tomato tomatoes, hero heroes, photo photos, piano pianos, cactus cacti, crisis crises, analysis analyses, index indices,
glass glasses, watch watches, fox foxes, bird birds, apple apples, chair chairs, server servers, token tokens,
query queries, batch batches, matrix matrices, cache caches, process processes, model models, request requests
"""

# verb past-tense
PAST = """
go went, come came, see saw, eat ate, drink drank, sing sang, swim swam, run ran, write wrote, read read, speak spoke,
break broke, take took, give gave, make made, do did, have had, be was, say said, think thought, buy bought, bring brought,
teach taught, catch caught, find found, feel felt, keep kept, sleep slept, leave left, lose lost, sell sold, tell told,
know knew, grow grew, fly flew, draw drew, drive drove, ride rode, rise rose, fall fell, begin began, win won, build built,
send sent, spend spent, meet met, pay paid, hear heard, hold held, stand stood, understand understood, walk walked,
play played, work worked, talk talked, ask asked, help helped, stop stopped, try tried, carry carried, love loved
"""

# thing | colour
COLOURS = """
the sky | blue
grass | green
snow | white
coal | black
a lemon | yellow
a banana | yellow
an orange | orange
a carrot | orange
blood | red
a tomato | red
a strawberry | red
chocolate | brown
an elephant | grey
a flamingo | pink
a raven | black
milk | white
the sun | yellow
the sea | blue
a leaf in spring | green
an emerald | green
a ruby | red
a sapphire | blue
gold | golden
lavender | purple
a frog | green
a swan | white
"""

# animal | sound | young
ANIMALS = """
dog | woof | puppy | 🐶
cat | meow | kitten | 🐱
cow | moo | calf | 🐮
horse | neigh | foal | 🐴
sheep | baa | lamb | 🐑
goat | maa | kid | 🐐
pig | oink | piglet | 🐷
duck | quack | duckling | 🦆
chicken | cluck | chick | 🐔
lion | roar | cub | 🦁
frog | ribbit | tadpole | 🐸
owl | hoot | owlet | 🦉
bee | buzz | larva | 🐝
mouse | squeak | pup | 🐭
wolf | howl | cub | 🐺
"""

# thing | emoji
EMOJI = """
heart | ❤️
sun | ☀️
moon | 🌙
star | ⭐
rainbow | 🌈
tree | 🌳
flower | 🌸
rose | 🌹
fire | 🔥
snowman | ⛄
wave | 🌊
mountain | ⛰️
house | 🏠
car | 🚗
train | 🚂
plane | ✈️
rocket | 🚀
ship | 🚢
bicycle | 🚲
apple | 🍎
banana | 🍌
cherry | 🍒
pizza | 🍕
bread | 🍞
cake | 🎂
coffee | ☕
book | 📚
pencil | ✏️
computer | 💻
phone | 📱
clock | ⏰
key | 🔑
gift | 🎁
balloon | 🎈
guitar | 🎸
football | ⚽
robot | 🤖
ghost | 👻
smile | 😊
penguin | 🐧
fox | 🦊
panda | 🐼
tiger | 🐯
elephant | 🐘
fish | 🐟
whale | 🐳
butterfly | 🦋
turtle | 🐢
"""

# element | symbol
ELEMENTS = """
hydrogen H, helium He, lithium Li, beryllium Be, boron B, carbon C, nitrogen N, oxygen O, fluorine F, neon Ne, sodium Na,
magnesium Mg, aluminium Al, silicon Si, phosphorus P, sulfur S, chlorine Cl, argon Ar, potassium K, calcium Ca, titanium Ti,
chromium Cr, manganese Mn, iron Fe, cobalt Co, nickel Ni, copper Cu, zinc Zn, silver Ag, tin Sn, iodine I, tungsten W,
platinum Pt, gold Au, mercury Hg, lead Pb, radium Ra, uranium U
"""

# language | hello | thank you | goodbye
LANGUAGES = """
French | Bonjour | Merci | Au revoir
German | Hallo | Danke | Auf Wiedersehen
Spanish | Hola | Gracias | Adiós
Italian | Ciao | Grazie | Arrivederci
Portuguese | Olá | Obrigado | Adeus
Dutch | Hallo | Dank je | Tot ziens
Swedish | Hej | Tack | Hej då
Polish | Cześć | Dziękuję | Do widzenia
Russian | Привет | Спасибо | До свидания
Greek | Γεια σου | Ευχαριστώ | Αντίο
Turkish | Merhaba | Teşekkür ederim | Hoşça kal
Chinese | 你好 | 谢谢 | 再见
Japanese | こんにちは | ありがとう | さようなら
Korean | 안녕하세요 | 감사합니다 | 안녕히 가세요
Hindi | नमस्ते | धन्यवाद | अलविदा
Arabic | مرحبا | شكرا | مع السلامة
Hebrew | שלום | תודה | להתראות
Latin | Salve | Gratias | Vale
"""

# kind of thing | examples, in a fixed order, so that "List 3 ..." has one right answer
LISTS = """
fruits | apple, banana, cherry, orange, pear, grape, mango, lemon, peach, plum
vegetables | carrot, potato, onion, tomato, spinach, cabbage, pea, bean, garlic, leek
animals | dog, cat, horse, cow, lion, elephant, tiger, bear, wolf, rabbit
birds | eagle, owl, sparrow, penguin, swan, robin, crow, duck, parrot, stork
colours | red, blue, green, yellow, orange, purple, pink, brown, black, white
colors | red, blue, green, yellow, orange, purple, pink, brown, black, white
programming languages | Python, C, Java, Rust, Go, Ruby, Swift, Kotlin, Haskell, Lua
prime numbers | 2, 3, 5, 7, 11, 13, 17, 19, 23, 29
even numbers | 2, 4, 6, 8, 10, 12, 14, 16, 18, 20
odd numbers | 1, 3, 5, 7, 9, 11, 13, 15, 17, 19
square numbers | 1, 4, 9, 16, 25, 36, 49, 64, 81, 100
countries | France, Japan, Brazil, Egypt, Canada, Kenya, Germany, India, Peru, Norway
European countries | France, Germany, Italy, Spain, Portugal, Poland, Greece, Sweden, Norway, Austria
African countries | Kenya, Egypt, Nigeria, Ghana, Morocco, Ethiopia, Senegal, Angola, Zambia, Mali
Asian countries | Japan, China, India, Thailand, Vietnam, Nepal, Iran, Jordan, Mongolia, Indonesia
musical instruments | piano, guitar, violin, flute, drum, trumpet, cello, harp, clarinet, organ
sports | football, tennis, swimming, running, basketball, cycling, skiing, rowing, boxing, chess
flowers | rose, tulip, daisy, lily, violet, sunflower, orchid, poppy, iris, lavender
trees | oak, pine, birch, maple, willow, ash, beech, cedar, palm, elm
metals | iron, copper, gold, silver, tin, lead, zinc, nickel, platinum, aluminium
drinks | water, tea, coffee, milk, juice, lemonade, cocoa, cider, wine, beer
body parts | head, arm, hand, leg, foot, eye, ear, nose, mouth, knee
pieces of furniture | table, chair, bed, sofa, desk, shelf, lamp, stool, bench, wardrobe
clothes | shirt, trousers, socks, shoes, coat, hat, scarf, gloves, dress, sweater
professions | doctor, teacher, baker, farmer, nurse, pilot, cook, painter, carpenter, engineer
"""
# countries of "List 3 countries and their capitals.", in this order
LISTED_COUNTRIES = "France, Japan, Brazil, Egypt, Canada, Kenya, Germany, India, Peru, Norway"

NAMES = """
Anna, Ben, Clara, David, Emma, Felix, Grace, Henry, Iris, Jack, Karen, Leo, Maria, Noah, Olivia, Peter, Quentin, Rosa, Sam,
Tina, Ulrich, Vera, William, Xavier, Yara, Zoe, Alice, Bob, Carol, Daniel, Eve, Frank, Georg, Hannah, Ivan, Julia, Kevin,
Laura, Martin, Nina, Oscar, Paula, Robert, Sofia, Thomas, Ursula, Victor, Wendy, Amir, Fatima, Chen, Wei, Yuki, Hiro, Priya,
Raj, Olga, Dmitri, Ingrid, Lars, Pierre, Camille, Diego, Lucia, Marco, Giulia, Kofi, Amina, Tom, Tim, Max, Mia, Lily, James
"""

# animal | legs
LEGS = """
cat | 4
cow | 4
horse | 4
sheep | 4
pig | 4
lion | 4
elephant | 4
mouse | 4
frog | 4
chicken | 2
duck | 2
penguin | 2
human | 2
ant | 6
bee | 6
butterfly | 6
beetle | 6
crab | 10
snake | 0
fish | 0
worm | 0
snail | 0
"""

# person | who that was
PEOPLE = """
Albert Einstein | Albert Einstein was a physicist who found the theory of relativity.
Isaac Newton | Isaac Newton was a scientist who described gravity and the laws of motion.
Marie Curie | Marie Curie was a scientist who discovered radium and won two Nobel prizes.
Charles Darwin | Charles Darwin was a scientist who described evolution by natural selection.
Galileo Galilei | Galileo Galilei was an astronomer who looked at the moons of Jupiter through a telescope.
Ada Lovelace | Ada Lovelace was a mathematician who is often called the first programmer.
Alan Turing | Alan Turing was a mathematician who laid the foundations of computer science.
Grace Hopper | Grace Hopper was a computer scientist who built one of the first compilers.
William Shakespeare | William Shakespeare was an English writer of plays and poems, such as Hamlet.
Jane Austen | Jane Austen was an English writer, known for Pride and Prejudice.
Leo Tolstoy | Leo Tolstoy was a Russian writer, known for War and Peace.
Victor Hugo | Victor Hugo was a French writer, known for Les Misérables.
Leonardo da Vinci | Leonardo da Vinci was a painter and inventor, known for the Mona Lisa.
Vincent van Gogh | Vincent van Gogh was a Dutch painter, known for The Starry Night.
Pablo Picasso | Pablo Picasso was a Spanish painter, known for Guernica.
Ludwig van Beethoven | Ludwig van Beethoven was a German composer of nine symphonies.
Wolfgang Amadeus Mozart | Wolfgang Amadeus Mozart was an Austrian composer, known for The Magic Flute.
Neil Armstrong | Neil Armstrong was the first person on the moon.
Yuri Gagarin | Yuri Gagarin was the first person in space.
Linus Torvalds | Linus Torvalds is the programmer who started Linux.
Guido van Rossum | Guido van Rossum is the programmer who created Python.
"""

# what the model does not know, so that it learns to say so
UNKNOWN_TERMS = """
quantum physics, chemistry, biology, philosophy, economics, history, psychology, astronomy, medicine, law, art, religion,
politics, a bicycle, a guitar, football, chess, a hammer, a window, a sandwich, a bridge, an umbrella, a mirror, money, time,
a dream, a ghost, California, Texas, Bavaria, Scotland, Sicily, Hawaii, Alaska, Siberia, Europe, Africa, Wakanda, Atlantis,
Narnia, Mars, Lyon, Munich, Milan, Barcelona, Shanghai, Mumbai, Chicago, Toronto, Sydney, Kubernetes, Java, Rust, blockchain,
a spreadsheet, a printer, a keyboard, a mouse pad, a screen, a modem, Bluetooth, encryption, a password, an electric car,
a steam engine, a telescope, a microscope, a compass, a helicopter, a submarine, a satellite, a laser, plastic, concrete,
cotton, marble, coffee, butter, cheese, vinegar, a sausage, a violin concerto, jazz, opera, ballet, cinema, sculpture,
a castle, a pyramid, a tunnel, a lottery, a mortgage, insurance, a contract, a parliament, a constitution, a revolution,
a muscle, a nerve, an allergy, a headache, a fever, calculus, geometry, topology, a matrix, a vector, an integral, a theorem,
a limerick, a novel, a paragraph, an adverb, a pronoun, a dinosaur, a mammoth, a unicorn, a whale shark, a mushroom, moss
"""
UNKNOWN_PEOPLE = """
my neighbour, John Smith, Mary Miller, the mayor, the boss, Napoleon, Cleopatra, Julius Caesar, Elvis Presley, Madonna,
Plato, Aristotle, Socrates, Confucius, Gandhi, Kant, the winner, the pope, Batman, Santa Claus, Sherlock Holmes, Zeus
"""
UNKNOWN_TOPICS = """
a dog, a horse, a bird, a king, a queen, a princess, a knight, a witch, a child, a mother, a teacher, a doctor, a train,
a ship, a mountain, a forest, a river, a city, a castle, a garden, a bear, a wolf, a mouse, an elephant, a lion, a rabbit,
love, friendship, time, winter, summer, snow, war, peace, hope, happiness, my friend, my cat and my dog, the sun, the wind,
a flower, a rose, a star, the stars, a football game, Paris, London, New York, a trip to space, a pirate, a ghost, money
"""
