"""From a checked chat request of any surface to what the engine is asked for."""

from __future__ import annotations

from . import prompts
from .chat import ChatRequest
from .front import Front
from .job import Work


async def turn(front: Front, asked: ChatRequest) -> Work:
    """The work of one turn of a conversation; its prompt is rendered off the event loop.

    Raises:
      ApiError: the template refuses the messages, or they are too long.
    """
    prompt = await front.off_loop(prompts.from_messages, front.served, asked.messages, front.longest)
    return Work((prompt,), asked.options, "messages", False, asked.options.prompt_logprobs)
