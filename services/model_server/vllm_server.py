"""vLLM's OpenAI-compatible server in this process. Owns how a configuration becomes its arguments."""

from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rolecall.errors import ConfigError
from services.model_server.config import ServerConfig


async def serve(config: ServerConfig) -> None:
    """Serves the model until the process is asked to stop, or vLLM's engine is lost. ConfigError, in one line, when
    vLLM refuses its arguments: it would again at each restart.
    """
    words = ["--host", config.host, "--port", str(config.port), "--model", str(config.model)]
    words += ["--served-model-name", *config.model_names, "--disable-uvicorn-access-log"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    vars(arguments).update(config.engine)
    validate_parsed_serve_args(arguments)
    try:
        await run_server(arguments)  # bounded: by nothing, on purpose: the server's whole life
    except ValueError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"vLLM refuses what reward.servers.{config.name} asks of it: {said}") from error
