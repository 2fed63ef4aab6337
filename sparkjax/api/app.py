"""The routes."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import sparkjax
from sparkjax.structured.tools import WRITERS

from . import admin, chat, completions, embeddings, prompts, score, tokens
from .anthropic.routes import Messages, model_card
from .deep import WeightCheck
from .desk import Desk
from .encoding import json_response as _json
from .engine import EngineService
from .errors import ApiError, show
from .front import Front
from .gate import Gate, error_response, record_of
from .job import Work
from .keys import Keys, RateLimit
from .pages import PAGES, page
from .reply import Reply
from .responses.routes import Responses
from .schema import openapi
from .served import ServedModel
from .status import status
from .turn import turn
from .wire import ChatWire, CompletionWire, Wire

log = logging.getLogger(__name__)

MOST_TOKENIZE = 1_000_000
"""Tokens of /tokenize and /detokenize: more than any context, to count what is too long."""


def create_app(
    served: ServedModel,
    engine: EngineService,
    http: Any,
    log_config: Any = None,
    *,
    stall_seconds: float = 120.0,
    profiler: admin.Profiler | None = None,
) -> FastAPI:
    """The whole API over one engine.

    Args:
      http: `sparkjax.settings.Http`.
      log_config: `sparkjax.settings.Log`.
      stall_seconds: without progress of the engine under load before /health says so.

    Raises:
      ValueError, OSError: the key file is empty or cannot be read.
    """
    keys = Keys.read(http.api_keys) if http.api_keys is not None else None
    if keys is None and not loopback(http.host):
        log.warning(
            "ANYONE WHO CAN REACH %s:%s CAN USE THIS SERVER: it listens beyond this machine without "
            "API keys. Set http.api_keys to a file of keys, or http.host to 127.0.0.1.",
            http.host, http.port,
        )  # fmt: skip
    front = Front(served, engine, stall_seconds)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        front.close()

    app = FastAPI(
        title="sparkjax", version=sparkjax.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.front = front
    app.openapi = lambda: openapi(served)  # type: ignore[method-assign]
    desk = Desk(front, http, bool(log_config and log_config.prompts))
    routes = _Routes(desk, front, http, profiler or admin.Profiler())
    surfaces = (routes, Responses(desk), Messages(desk))
    by_path: dict[str, dict[str, Callable]] = {}
    for method, path, handler in (route for surface in surfaces for route in surface.all()):
        by_path.setdefault(path, {})[method] = handler
    for path, handlers in by_path.items():  # one route each: a 405 names all that is allowed
        app.add_route(path, _by_method(handlers), methods=list(handlers))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _crash)
    app.add_middleware(
        Gate,
        metrics=front.metrics,
        keys=keys,
        limit=RateLimit(http.requests_per_minute) if http.requests_per_minute else None,
        most=http.max_connections,
        origins=tuple(http.cors_origins),
    )
    if http.cors_origins:  # outside of the gate: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(http.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _by_method(handlers: dict[str, Callable]) -> Callable:
    async def handle(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        response: Response = await handlers[method](request)
        return response

    return handle


def loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclasses.dataclass
class _Routes:
    desk: Desk
    front: Front
    http: Any
    profiler: admin.Profiler

    def __post_init__(self) -> None:
        self.weights = WeightCheck(self.front.served.weight_problems)

    def all(self) -> list[tuple[str, str, Callable]]:
        return [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/embeddings", self.embeddings),
            ("POST", "/v1/score", self.score),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/tokenizer_info", self.tokenizer_info),
            ("GET", "/status", self.status),
            *(("GET", path, page) for path in PAGES),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            ("POST", "/admin/profile", self.profile),
        ]

    # --- Generation -----------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        arrived = time.monotonic()
        values = await self.desk.json(request)
        self.front.check()
        served = self.front.served
        asked = chat.parse(values, served, secrets.randbits(64))
        self.desk.note(request, asked.messages)

        async def prepare() -> tuple[Work, Wire]:
            wire = ChatWire(served.tokenizer, asked.options.sampling.logprobs is not None)
            return await turn(self.front, asked), wire

        return self._reply(prepare, "chatcmpl-", arrived)

    async def completions(self, request: Request) -> Response:
        arrived = time.monotonic()
        values = await self.desk.json(request)
        self.front.check()
        served = self.front.served
        asked = completions.parse(values, served, secrets.randbits(64))
        self.desk.note(request, asked.prompts)
        options = asked.options

        def read() -> tuple[Work, Wire]:
            found = tuple(
                prompts.from_raw(served, prompt, self.front.longest) for prompt in asked.prompts
            )
            logprobs = options.sampling.logprobs
            scored = [options.prompt_logprobs, logprobs if asked.echo else None]
            wanted = max((each for each in scored if each is not None), default=None)
            work = Work(found, options, "prompt", True, wanted)
            echoes = found if asked.echo else ()
            return work, CompletionWire(served.tokenizer, logprobs is not None, echoes, options.n)

        async def prepare() -> tuple[Work, Wire]:
            return await self.front.off_loop(read)

        return self._reply(prepare, "cmpl-", arrived)

    async def embeddings(self, request: Request) -> Response:
        return await embeddings.embed(self.desk, request)

    async def score(self, request: Request) -> Response:
        return await score.score(self.desk, request)

    def _reply(self, prepare: Any, prefix: str, arrived: float) -> Reply:
        return Reply(
            self.front,
            prepare,
            id_prefix=prefix,
            arrived=arrived,
            silence=self.http.keep_alive_seconds,
        )

    # --- Text -----------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        values = await self.desk.json(request)
        limit = max(MOST_TOKENIZE, self.front.longest)
        return _json(await self.front.off_loop(tokens.tokenize, values, self.front.served, limit))

    async def detokenize(self, request: Request) -> Response:
        values = await self.desk.json(request)
        limit = max(MOST_TOKENIZE, self.front.longest)
        return _json(await self.front.off_loop(tokens.detokenize, values, self.front.served, limit))

    async def tokenizer_info(self, request: Request) -> Response:
        return _json(tokens.tokenizer_info(self.front.served))

    # --- The model ------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        names = self.front.served.names
        if "anthropic-version" in request.headers:
            data = [model_card(name, self.front.served.created) for name in names]
            ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
            return _json({"data": data, **ends})
        return _json({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self.front.served.names:
            raise ApiError(
                404, f"model {show(name)} is not served here", param="model", code="model_not_found"
            )
        if "anthropic-version" in request.headers:
            return _json(model_card(name, self.front.served.created))
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        front, served, limits = self.front, self.front.served, self.front.engine.limits
        pool = limits.pages * limits.page_size
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "sparkjax",
            "root": served.id,
            "max_model_len": front.longest,
            "context": {
                "request_limit_tokens": front.longest,
                "position_ceiling_tokens": served.context,
                "kv_pool_tokens": pool,
                "limited_by": "kv-pool" if pool < served.context else "position-ceiling",
            },
            "sampling": {"available": True, "defaults": dataclasses.asdict(served.defaults)},
            "chat": {"available": served.template is not None},
            "tools": {
                "available": served.template is not None and served.format.calls,
                "constrained": served.format.name in WRITERS,
                "format": served.format.name,
            },
            "reasoning": {
                "available": served.thinking.available,
                "switchable": served.thinking.switch is not None,
                "default": served.thinking.default,
                "effort_mapping": served.thinking.efforts,
            },
            "response_format": {"json_object": True, "json_schema": True},
            "structured_outputs": {"regex": True, "choice": True, "lark": True, "gbnf": True},
            "input_modalities": ["text"],
        }

    # --- Operation ------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        engine = self.front.engine
        if engine.state == "failed":
            return _json({"status": "failed", "error": engine.failure}, 503)
        stalled = self.front.stalled()
        if stalled is not None:
            return _json(
                {"status": "stalled", "error": f"no progress for {stalled:.0f} s with work to do"},
                503,
            )
        status = {"status": "ok", "model": self.front.served.id}
        if request.query_params.get("deep") != "1":
            return _json(status)
        problems = await self.weights.problems()
        if problems:
            return _json({"status": "corrupt", "error": "; ".join(problems[:8])}, 503)
        return _json({**status, "weights": "unchecked" if problems is None else "ok"})

    async def ready(self, request: Request) -> Response:
        state = self.front.engine.state
        if state == "ready" and self.front.stalled() is not None:
            state = "stalled"
        if state == "ready":
            return _json({"status": "ready"})
        return _json({"status": state}, 503, {"Retry-After": "5"})

    async def status(self, request: Request) -> Response:
        return _json(status(self.front))

    async def metrics(self, request: Request) -> Response:
        text, kind = self.front.metrics.render()
        return Response(text, headers={"content-type": kind})

    async def profile(self, request: Request) -> Response:
        admin.check_local(request)
        seconds, directory = admin.parse(await self.desk.json(request))
        return _json(await self.profiler.record(seconds, directory))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, record_of(request.scope))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is no route {show(request.url.path)}",
        405: f"{request.method} is not allowed on {show(request.url.path)}",
    }
    refused = ApiError(
        error.status_code,
        words.get(error.status_code, error.detail),
        headers=dict(error.headers or {}),
    )
    return error_response(refused, record_of(request.scope))


async def _crash(request: Request, error: Exception) -> Response:
    # The trace is logged by whoever gets the exception next; the client learns nothing of it.
    crashed = ApiError(500, "internal error", code="internal_error")
    return error_response(crashed, record_of(request.scope))


__all__ = ["create_app", "loopback"]
