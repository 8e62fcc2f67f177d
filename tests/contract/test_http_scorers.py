"""Scorers that are HTTP servers of other people's shapes, over real HTTP: what each is sent, and what becomes of its
answers.
"""

import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from pydantic import ValidationError

from rolecall.errors import ConfigError
from rolecall.scoring.http import seconds_of
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import ExternalScorer, RpcSection
from rolecall.v1 import open_inference_pb2, reward_pb2, trajectory_pb2
from services.reward.external.component import HttpComponent, open_http
from tests.contract.peer import Authority
from tests.twins.http_scorer import HttpTwin, Reply, http_server


@asynccontextmanager
async def component(kind: str, twin: HttpTwin, path: str = "/score", **keys: Any) -> AsyncIterator[HttpComponent]:
    """The component `it` behind `twin`."""
    with http_server(twin) as url:
        scorer = ExternalScorer.model_validate({"kind": kind, "address": url + path, **keys})
        opened = open_http("it", scorer, RpcSection(), timeout_s=30.0, max_attempts=1)
        try:
            yield opened
        finally:
            await opened.close()


def items_of(*responses: str) -> list[reward_pb2.ScoreItem]:
    """One item per response, each to a prompt of two messages."""
    messages = [
        trajectory_pb2.Message(role="system", content="Be brief."),
        trajectory_pb2.Message(role="user", content="2 + 2?"),
    ]
    items = [
        reward_pb2.ScoreItem(id=str(i), messages=messages, response_text=text, ground_truth="4")
        for i, text in enumerate(responses)
    ]
    for i, item in enumerate(items):
        item.metadata.update({"level": i} if i else {"level": i, "source": "sums"})
    return items


def values(outcomes: Sequence[Outcome]) -> list[float | str]:
    """Each score, or the code of its failure."""
    return [outcome.value if isinstance(outcome, Score) else outcome.code for outcome in outcomes]


async def test_openrlhf_is_sent_queries_prompts_and_labels() -> None:
    twin = HttpTwin(lambda request: {"rewards": [len(query) for query in request.body["query"]], "scores": None})
    async with component("openrlhf", twin) as scorer:
        assert values(await scorer.score(items_of("4", "five"))) == [18.0, 21.0]
    (request,) = twin.requests
    assert (request.method, request.path) == ("POST", "/score")
    assert request.body == {
        "query": ["Be brief.\n2 + 2?\n4", "Be brief.\n2 + 2?\nfive"],
        "prompts": ["Be brief.\n2 + 2?\n"] * 2,
        "labels": ["4", "4"],
    }


async def test_trl_is_sent_conversations_and_every_field_of_the_data_set() -> None:
    def reward(prompts: Any, completions: Any, ground_truth: list[str], **fields: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(text == truth) if text else None for text, truth in zip(texts, ground_truth, strict=True)]

    twin = HttpTwin(lambda request: reward(**request.body))
    async with component("trl", twin, range=[0, 1]) as scorer:
        spec = await scorer.describe()
        assert (spec.reward.min, spec.reward.max) == (0.0, 1.0)
        assert values(await scorer.score(items_of("4", "5", ""))) == [1.0, 0.0, "ABSTAINED"]
    (request,) = twin.requests
    assert request.body["prompts"][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
    ]
    assert request.body["completions"][1] == [{"role": "assistant", "content": "5"}]
    assert (request.body["level"], request.body["source"]) == ([0, 1, 2], ["sums", None, None])


async def test_many_items_are_several_calls_and_keep_their_order() -> None:
    twin = HttpTwin(lambda request: [float(text[0]["content"]) for text in request.body["completions"]])
    async with component("trl", twin) as scorer:
        assert values(await scorer.score(items_of(*map(str, range(150))))) == [float(i) for i in range(150)]
    assert sorted(len(request.body["completions"]) for request in twin.requests) == [22, 64, 64]


WRONG: dict[str, Any] = {
    "one too few": [0.5],
    "one too many": [0.5, 0.5, 0.5],
    "text": [0.5, "0.5"],
    "true": [0.5, True],
    "NaN": Reply(body=b"[0.5, NaN]"),
    "infinity": Reply(body=b"[0.5, -Infinity]"),
    "beyond float32": [0.5, 1e39],
    "beyond a float": [0.5, 10**400],
    "nested deep": Reply(body=b"[" * 100_000),
    "beyond its range": [0.5, 1.01],
    "lists": [0.5, [0.5]],
    "an object": {"score": [0.5, 0.5]},
    "a number": 0.5,
    "half of it": Reply(body=b'{"rewards": [0.5, '),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["openrlhf", "trl"])
async def test_a_wrong_answer_is_never_a_number(kind: str, wrong: str) -> None:
    async with component(kind, HttpTwin(lambda request: WRONG[wrong]), range=[0, 1]) as scorer:
        first, second = values(await scorer.score(items_of("4", "5")))
    assert second == "SCORER_FAILED"
    assert first in (0.5, "SCORER_FAILED")


async def test_a_server_that_is_there_is_found_at_the_start_and_one_that_refuses_us_is_told() -> None:
    twin = HttpTwin(lambda request: [1.0])
    for status in (200, 404, 405, 501):  # it takes POST alone
        twin.look = Reply(status)
        async with component("trl", twin) as scorer:
            await scorer.describe()
    twin.look = Reply(401, b"who are you?")
    async with component("trl", twin) as scorer:
        (failure,) = await scorer.score(items_of("4"))
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable) == ("UNAUTHENTICATED", True)


def model(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], infer: Callable[[Any], Any]) -> HttpTwin:
    """A model behind the Open Inference Protocol."""

    twin = HttpTwin(lambda request: infer(request.body))
    twin.look = {"name": "m", "inputs": inputs, "outputs": outputs}
    return twin


def text(name: str, *shape: int) -> dict[str, Any]:
    """The metadata of a tensor of text."""
    return {"name": name, "datatype": "BYTES", "shape": list(shape or (-1,))}


SCORE = {"name": "score", "datatype": "FP32", "shape": [-1, 1]}


async def test_a_model_behind_kserve_is_given_the_tensors_that_it_names() -> None:
    def infer(body: Any) -> Any:
        data = [len(response) for response in body["inputs"][1]["data"]]
        return {"outputs": [{"name": "score", "datatype": "FP32", "shape": [2, 1], "data": data}]}

    inputs = [text("prompt", -1, 1), text("response"), text("ground_truth")]
    logits = {"name": "logits", "datatype": "FP32", "shape": [-1, 2]}
    twin = model(inputs, [SCORE, logits], infer)
    async with component("kserve", twin, "/v2/models/m") as scorer:
        assert values(await scorer.score(items_of("4", "five"))) == [1.0, 4.0]
    (request,) = twin.requests
    assert request.path == "/v2/models/m/infer"
    assert request.body["inputs"] == [
        {"name": "prompt", "datatype": "BYTES", "shape": [2, 1], "data": ["Be brief.\n2 + 2?\n"] * 2},
        {"name": "response", "datatype": "BYTES", "shape": [2], "data": ["4", "five"]},
        {"name": "ground_truth", "datatype": "BYTES", "shape": [2], "data": ["4", "4"]},
    ]
    assert request.body["outputs"] == [{"name": "score"}]


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        ([text("a"), text("b")], [SCORE], r"takes 'a' of BYTES; inputs must be BYTES, called"),
        ([{"name": "x", "datatype": "INT64", "shape": [-1]}], [SCORE], "takes 'x' of INT64"),
        ([text("x")], [text("y")], r"gives \['y'\]; one output must be"),
        ([text("x")], [{**SCORE, "name": "a"}, {**SCORE, "name": "b"}], r"gives \['a', 'b'\]"),
    ],
)
async def test_a_model_that_is_no_scorer_is_refused_at_the_start(
    inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], told: str
) -> None:
    async with component("kserve", model(inputs, outputs, json.dumps), "/v2/models/m") as scorer:
        with pytest.raises(ConfigError, match=told):
            await scorer.describe()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"outputs": []},
        {"outputs": [{"name": "other", "data": [1.0, 1.0]}]},
        {"outputs": [{"name": "score", "data": [1.0]}]},
        {"outputs": [{"name": "score", "data": [[1.0, 2.0], [1.0, 2.0]]}]},
        {"outputs": [{"name": "score"}]},
        {"outputs": ["score"]},
        {"outputs": [{"name": "score", "data": 3}]},
    ],
    ids=str,
)
async def test_a_wrong_answer_of_a_model_is_never_a_number(answer: Any) -> None:
    async with component("kserve", model([text("x")], [SCORE], lambda body: answer), "/v2/models/m") as scorer:
        assert values(await scorer.score(items_of("4", "5"))) == ["SCORER_FAILED"] * 2


@asynccontextmanager
async def model_over_grpc(
    metadata: open_inference_pb2.ModelMetadataResponse,
    infer: Callable[[open_inference_pb2.ModelInferRequest], open_inference_pb2.ModelInferResponse | None],
    max_attempts: int = 1,
) -> AsyncIterator[HttpComponent]:
    """The component `it` behind a server that knows the model `m` alone; UNAVAILABLE where `infer` answers None."""

    async def described(request: open_inference_pb2.ModelMetadataRequest, context: Any) -> Any:
        if request.name != "m":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}")
        return metadata

    async def inferred(request: open_inference_pb2.ModelInferRequest, context: Any) -> Any:
        answer = infer(request)
        if answer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "overloaded")
        return answer

    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ModelMetadata": grpc.unary_unary_rpc_method_handler(
            described,
            open_inference_pb2.ModelMetadataRequest.FromString,
            open_inference_pb2.ModelMetadataResponse.SerializeToString,
        ),
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            inferred,
            open_inference_pb2.ModelInferRequest.FromString,
            open_inference_pb2.ModelInferResponse.SerializeToString,
        ),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scorer = ExternalScorer(kind="kserve", address=f"grpc://127.0.0.1:{port}/m", range=(0, 9))
    opened = open_http("it", scorer, RpcSection(), timeout_s=30.0, max_attempts=max_attempts)
    try:
        yield opened
    finally:
        await opened.close()
        await server.stop(0)


TEXTS = open_inference_pb2.ModelMetadataResponse(
    inputs=[
        open_inference_pb2.ModelTensor(name="response", datatype="BYTES", shape=[-1, 1]),
        open_inference_pb2.ModelTensor(name="ground_truth", datatype="BYTES", shape=[-1]),
    ],
    outputs=[open_inference_pb2.ModelTensor(name="score", datatype="FP32", shape=[-1, 1])],
)
FP32 = open_inference_pb2.InferTensor(name="score", datatype="FP32", shape=[2, 1])


@pytest.mark.parametrize("is_raw", [False, True], ids=["in fields", "raw"])
async def test_a_model_over_grpc_is_given_text_and_read_in_fields_or_raw(is_raw: bool) -> None:
    asked: list[open_inference_pb2.ModelInferRequest] = []

    def infer(request: open_inference_pb2.ModelInferRequest) -> open_inference_pb2.ModelInferResponse:
        asked.append(request)
        lengths = [float(len(text)) for text in request.inputs[0].contents.bytes_contents]
        answer = open_inference_pb2.ModelInferResponse(outputs=[FP32])
        if is_raw:
            answer.raw_output_contents.append(np.array(lengths, "<f4").tobytes())
        else:
            answer.outputs[0].contents.fp32_contents.extend(lengths)
        return answer

    async with model_over_grpc(TEXTS, infer) as scorer:
        assert values(await scorer.score(items_of("4", "π"))) == [1.0, 2.0]
    (request,) = asked
    assert (request.model_name, [output.name for output in request.outputs]) == ("m", ["score"])
    assert [(tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [("BYTES", [2, 1]), ("BYTES", [2])]
    assert list(request.inputs[1].contents.bytes_contents) == [b"4", b"4"]


async def test_a_model_over_grpc_that_is_away_is_asked_max_attempts_times_and_no_more() -> None:
    asked: list[open_inference_pb2.ModelInferRequest] = []
    async with model_over_grpc(TEXTS, asked.append, max_attempts=2) as scorer:
        assert values(await scorer.score(items_of("4"))) == ["UNAVAILABLE"]
    assert len(asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        open_inference_pb2.ModelInferResponse(),
        open_inference_pb2.ModelInferResponse(outputs=[FP32]),
        open_inference_pb2.ModelInferResponse(outputs=[FP32], raw_output_contents=[b"12345"]),
        open_inference_pb2.ModelInferResponse(outputs=[FP32], raw_output_contents=[b"1234" * 2] * 2),
        open_inference_pb2.ModelInferResponse(
            outputs=[FP32], raw_output_contents=[np.full(2, np.nan, "<f4").tobytes()]
        ),
        open_inference_pb2.ModelInferResponse(
            outputs=[open_inference_pb2.InferTensor(name="score", datatype="INT32")], raw_output_contents=[b"12345678"]
        ),
    ],
    ids=["nothing", "no elements", "half an element", "other outputs", "NaN", "whole numbers"],
)
async def test_a_wrong_answer_over_grpc_is_never_a_number(answer: open_inference_pb2.ModelInferResponse) -> None:
    async with model_over_grpc(TEXTS, lambda request: answer) as scorer:
        assert values(await scorer.score(items_of("4", "5"))) == ["SCORER_FAILED"] * 2


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"kind": "trl", "address": "scorer:50051"}, "is no URL; write http"),
        ({"kind": "trl", "address": "grpc://scorer:50051/m"}, "is no URL; write http"),
        ({"kind": "trl", "address": "https://me:secret@scorer"}, "would stand in config.yaml"),
        ({"kind": "external", "address": "http://scorer"}, "is not an address"),
        ({"kind": "trl", "address": "http://scorer", "rubric": {}}, "trl has none"),
        ({"kind": "judge", "address": "http://scorer"}, "a judge needs one"),
        ({"kind": "external", "address": "scorer:1", "range": [0, 1]}, "of openrlhf, trl and kserve alone"),
        ({"kind": "trl", "address": "http://scorer", "range": [1, 0]}, "least, greatest"),
        ({"kind": "trl", "address": "http://scorer", "ca_file": "system"}, "need https://"),
    ],
)
def test_a_component_that_cannot_be_called_is_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ExternalScorer.model_validate(keys)


def test_retry_after_is_seconds_or_a_date() -> None:
    assert seconds_of("7") == 7.0
    assert seconds_of(None) == seconds_of("soon") == seconds_of("-3") == 0.0
    assert seconds_of("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0
    assert seconds_of("Fri, 31 Dec 2100 23:59:59 GMT") > 10**9


async def test_a_token_in_a_file_goes_with_each_call_as_it_stands_then(tmp_path: Path) -> None:
    authority, told = Authority(tmp_path / "tls"), list[str | None]()
    certificate, token = authority.issue("scorer"), tmp_path / "token"

    class Told(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            told.append(self.headers["authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate_file, certificate.key_file)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        token.write_text("first\n")
        url, files = (
            f"https://localhost:{server.server_port}",
            {"ca_file": authority.ca_file, "bearer_token_file": token},
        )
        scorer = ExternalScorer.model_validate({"kind": "trl", "address": url, **files})
        asked = JsonServer("mine", scorer, RpcSection(), timeout_s=20.0)
        for text in ("first", "another"):
            token.write_text(f"{text}\n")
            assert await asked.post("/score", {}) == []
        await asked.close()
        server.shutdown()
    assert told == ["Bearer first", "Bearer another"]
