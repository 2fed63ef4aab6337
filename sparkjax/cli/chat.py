"""`sparkjax chat`: a conversation with a running server."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from .client import Chunk, Client, ClientError

HISTORY = Path("~/.cache/sparkjax/chat_history").expanduser()
# A model may write anything; what would steer the terminal is not passed on to it.
_UNSEEN = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
HELP = """\
/reset            forget the conversation (the system message stays)
/system [TEXT]    set the system message, or show it; starts the conversation anew
/retry            answer the last question again
/set [KEY VALUE]  a sampling option: temperature, top_p, max_tokens, seed, ...; no value unsets it
/save FILE        write the conversation as JSON
/help             this list
/quit             leave (ctrl-d does too)

A line that ends in \\ goes on in the next one. Ctrl-c stops an answer and keeps what there is."""


class Chat:
    """One conversation.

    Attributes:
      messages: what the model is sent, in OpenAI's form.
      options: sampling options of every request.
    """

    def __init__(self, client: Client, model: str, system: str | None, options: dict[str, Any]):
        self.client, self.model, self.options = client, model, dict(options)
        self.messages: list[dict[str, str]] = []
        self.system(system or "")
        # Colours and hints are for a person; a pipe gets the bare answer.
        self.out = Console(highlight=False, soft_wrap=True)
        self.talkative = sys.stdin.isatty() and self.out.is_terminal

    def run(self) -> None:
        """Reads questions until the input ends."""
        if not sys.stdin.isatty():
            question = sys.stdin.read().strip()
            if question:
                self.ask(question)
            return
        remember = _line_editing()
        self.say(f"{self.model} at {self.client.url} · /help lists the commands")
        while True:
            try:
                line = self._read()
            except EOFError:
                self.out.print()
                break
            except KeyboardInterrupt:
                self.out.print()
                self.say("ctrl-d or /quit leaves")
                continue
            if line in ("/quit", "/exit"):
                break
            try:
                if line.startswith("/"):
                    self.command(line)
                elif line:
                    self.ask(line)
            except ClientError as error:
                self.out.print(Text(str(error), style="red"))
        remember()

    def _read(self) -> str:
        # Marked as taking no room, so that the line editor counts columns right.
        prompt = "\001\033[1;36m\002> \001\033[0m\002" if self.talkative else "> "
        lines = [input(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(". "))
        return "\n".join(lines).strip()

    def ask(self, question: str) -> None:
        """Sends a question and prints the answer as it comes; without one it is forgotten."""
        self.messages.append({"role": "user", "content": question})
        answer = ""
        try:
            answer = self._stream()
        finally:
            if not answer:
                self.messages.pop()
        if answer:
            self.messages.append({"role": "assistant", "content": answer})

    def _stream(self) -> str:
        started, first = time.monotonic(), None
        pieces: list[str] = []
        last, usage, stopped = Chunk(), None, False
        stream = self.client.chat(self.model, self.messages, **self.options)
        try:
            for chunk in stream:
                if chunk.text:
                    first = first or time.monotonic()
                    pieces.append(chunk.text)
                    self.out.file.write(chunk.text.translate(_UNSEEN))
                    self.out.file.flush()
                last = chunk if chunk.finish else last
                usage = chunk.usage or usage
        except KeyboardInterrupt:
            stopped = True
        finally:
            stream.close()  # type: ignore[attr-defined]
            self.out.print()
        note = ["stopped"] if stopped else []
        if last.finish == "length":
            note.append("cut at the token limit")
        if first and usage:
            count, seconds = usage["completion_tokens"], time.monotonic() - first
            note.append(f"{count} tokens")
            note += [f"{(count - 1) / seconds:.1f} tok/s"] if count > 1 and seconds > 0 else []
            note.append(f"first after {first - started:.2f} s")
        self.say(" · ".join(note))
        return "".join(pieces)

    def say(self, text: str) -> None:
        """A remark of the program itself."""
        if self.talkative and text:
            self.out.print(Text(text, style="dim"))

    # --- commands

    def command(self, line: str) -> None:
        """Carries out one /command."""
        name, _, rest = line[1:].partition(" ")
        verb: Callable[[str], None] | None = {
            "help": lambda _: self.out.print(Text(HELP)),
            "reset": lambda _: self.reset(),
            "system": self._system,
            "retry": lambda _: self.retry(),
            "set": self._set,
            "save": self.save,
        }.get(name)
        if verb is None:
            self.out.print(Text(f"there is no /{name}; /help lists the commands", style="red"))
        else:
            verb(rest.strip())

    def reset(self) -> None:
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self.say("a new conversation")

    def system(self, text: str) -> None:
        """Starts anew under this system message ("" for none)."""
        self.messages = [{"role": "system", "content": text}] if text else []

    def _system(self, text: str) -> None:
        if text:
            self.system(text)
            self.say("a new conversation under this system message")
        else:
            said = [m["content"] for m in self.messages if m["role"] == "system"]
            self.out.print(Text(said[0] if said else "no system message"))

    def retry(self) -> None:
        questions = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not questions:
            self.out.print(Text("nothing was asked yet", style="red"))
            return
        kept, question = self.messages, self.messages[questions[-1]]["content"]
        self.messages = kept[: questions[-1]]
        try:
            self.ask(question)
        except BaseException:
            self.messages = kept
            raise

    def _set(self, text: str) -> None:
        key, _, value = text.partition(" ")
        if value:
            with contextlib.suppress(ValueError):
                value = json.loads(value)
            self.options[key] = value
        elif key:
            self.options.pop(key, None)
        shown = ", ".join(f"{k} = {v}" for k, v in self.options.items())
        self.out.print(Text(shown or "the server's defaults", style="dim"))

    def save(self, name: str) -> None:
        if not name:
            self.out.print(Text("/save needs a file name", style="red"))
            return
        record = {"model": self.model, "options": self.options, "messages": self.messages}
        try:
            Path(name).expanduser().write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            self.out.print(Text(f"{name}: {error.strerror}", style="red"))
        else:
            self.say(f"saved to {name}")


def _line_editing() -> Callable[[], None]:
    """Arrow keys and a history of earlier questions; returns what keeps them for next time."""
    try:
        import readline
    except ImportError:
        return lambda: None
    with contextlib.suppress(OSError):
        readline.read_history_file(HISTORY)

    def remember() -> None:
        with contextlib.suppress(OSError):
            HISTORY.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(HISTORY)
            HISTORY.chmod(0o600)

    return remember
