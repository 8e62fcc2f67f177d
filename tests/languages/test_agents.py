"""Agents that people have, made from nothing and unchanged, at the rollout's endpoint: LangGraph, OpenAI's Agents SDK
(by Responses, its default), and OpenAI's client in JavaScript. Each talks for three turns, of which every token is
accounted for.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.environment import Agent, Policy
from tests.contract.test_rollout_harness import played
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer

pytestmark = [pytest.mark.languages, pytest.mark.timeout(600)]

LANGGRAPH = """
import sys
from typing import Annotated, TypedDict
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]

model = ChatOpenAI(base_url=sys.argv[1], api_key=sys.argv[2], model="policy", temperature=0.3)
graph = StateGraph(State)
graph.add_node("talk", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("ask", lambda state: {"messages": [HumanMessage(f"go on {len(state['messages'])}")]})
graph.add_edge(START, "talk")
graph.add_edge("ask", "talk")
graph.add_conditional_edges("talk", lambda state: END if len(state["messages"]) >= 6 else "ask")
graph.compile().invoke({"messages": [HumanMessage("hello")]})
"""
AGENTS = """
import asyncio, sys
from agents import Agent, Runner, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

async def main():
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2]))
    agent = Agent(name="a", instructions="be brief", model="policy")
    said = "hello"
    for turn in range(3):
        if turn == 1:
            result = Runner.run_streamed(agent, said)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, said)
        said = [*result.to_input_list(), {"role": "user", "content": f"go on {turn}"}]

asyncio.run(main())
"""
NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3] });
const messages = [{ role: "user", content: "hello" }];
for (let turn = 0; turn < 3; turn++) {
  let content = "";
  if (turn === 1) {
    for await (const event of await client.chat.completions.create({ model: "policy", messages, stream: true })) {
      content += event.choices[0]?.delta?.content ?? "";
    }
  } else {
    content = (await client.chat.completions.create({ model: "policy", messages })).choices[0].message.content;
  }
  messages.push({ role: "assistant", content }, { role: "user", content: `go on ${turn}` });
}
"""


def python(folder: Path, script: str, *packages: str) -> list[str]:
    """The command of a script in a virtual environment of its own with these packages."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    program = str(folder / "venv" / "bin" / "python")
    subprocess.run([program, "-m", "pip", "install", "-q", *packages], check=True, timeout=400)
    (folder / "agent.py").write_text(script)
    return [program, str(folder / "agent.py")]


def node(folder: Path, script: str, *packages: str) -> list[str]:
    """The command of a script of Node beside these packages."""
    subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), *packages], check=True, timeout=400)
    (folder / "agent.mjs").write_text(script)
    return ["node", str(folder / "agent.mjs")]


@pytest.mark.parametrize("harness", ["langgraph", "agents", "node"])
async def test_of_a_harness_as_it_is_every_token_is_accounted_for(
    store: StoreUnderTest, tmp_path: Path, harness: str
) -> None:
    if harness == "node" and shutil.which("npm") is None:
        pytest.skip("without npm")
    (tmp_path / "harness").mkdir()
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    if harness == "node":
        command = node(tmp_path / "harness", NODE, "openai@6")
    elif harness == "langgraph":
        command = python(tmp_path / "harness", LANGGRAPH, "langgraph==1.2.*", "langchain-openai==1.7.*")
    else:
        command = python(tmp_path / "harness", AGENTS, "openai-agents==0.24.*")

    class Harness(Agent):
        """An agent in a process of its own."""

        def run(self, policy: Policy) -> float:
            subprocess.run([*command, policy.base_url, policy.api_key], check=True, timeout=100)
            return 0.5

    rows = await played(store, tmp_path / "model", Harness, num=1, generation_timeout_s=200.0, budget_s=150.0)
    for row, meta in rows:
        tokens = meta.episode.tokens
        assert tokens.num_calls == 3
        assert tokens.num_trained == row["response_mask"].sum()
        assert tokens.num_sampled == tokens.num_trained + sum(tokens.masked.values())
        assert len(meta.episode.turns) == 3
        assert dict(tokens.branches) == {"first": 1}
