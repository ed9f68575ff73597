"""The Python programs of the PaddleNLP server's document. `ADDRESS` stands for its IP and port, which it writes without
quotes."""

NATIVE = """
import uuid
import json
import requests

url = "http://ADDRESS/v1/chat/completions"
req_id = str(uuid.uuid1())
data_single = {
    "text": "Hello, how are you?",
    "req_id": req_id,
    "max_dec_len": 64,
    "stream": True,
}
res = requests.post(url, json=data_single, stream=True)
for line in res.iter_lines():
    print(json.loads(line))

data_multi = {
    "messages": [
        {"role": "user", "content": "Hello, who are you"},
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "List 3 countries and their capitals."},
    ],
    "req_id": req_id,
    "max_dec_len": 64,
    "stream": True,
}
res = requests.post(url, json=data_multi, stream=True)
for line in res.iter_lines():
    print(json.loads(line))
"""

OPENAI = """
import openai

client = openai.Client(base_url="http://ADDRESS/v1/chat/completions", api_key="EMPTY_API_KEY")

response = client.completions.create(
    model="default",
    prompt="Hello, how are you?",
    max_tokens=50,
    stream=False,
)
print(response)
print("\\n")

response = client.completions.create(
    model="default",
    prompt="Hello, how are you?",
    max_tokens=100,
    stream=True,
)
for chunk in response:
    if chunk.choices[0] is not None:
        print(chunk.choices[0].text, end='')
print("\\n")

messages = [
    {"role": "user", "content": "Hello, who are you"},
    {"role": "system", "content": "I'm a helpful AI assistant."},
    {"role": "user", "content": "List 3 countries and their capitals."},
]
response = client.chat.completions.create(
    model="default",
    messages=messages,
    temperature=0,
    max_tokens=64,
    stream=False,
)
print(response)
print("\\n")

response = client.chat.completions.create(
    model="default",
    messages=messages,
    temperature=0,
    max_tokens=64,
    stream=True,
)
for chunk in response:
    if chunk.choices[0].delta is not None:
        print(chunk.choices[0].delta.content, end='')
print("\\n")
"""
