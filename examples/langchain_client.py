"""LangChain as a client: a prompt, a model and a parser as one chain.

`pip install langchain-openai`, and start a server: `minisgl serve`. Another address:
OPENAI_BASE_URL=http://host:port/v1.
"""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model="default",
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:1919/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),  # it wants one, the server does not
    temperature=0,
    max_tokens=40,
)
prompt = ChatPromptTemplate.from_messages(
    [("system", "Answer in one sentence."), ("user", "What is the capital of {country}?")]
)
chain = prompt | model | StrOutputParser()
print("answer:", chain.invoke({"country": "France"}))
print("streamed:", "".join(chain.stream({"country": "France"})))
print("batch of", len(chain.batch([{"country": name} for name in ("Italy", "Spain", "Peru")])))
