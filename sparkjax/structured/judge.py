"""Which grammars may come in: each is built and tried in a process that may be killed.

A schema, a pattern or a grammar is a client's program. The engine's limits are counted and hold for
every token, but compiling knows none for some shapes (one number can cost minutes), so the trial
has a clock, and a limit of memory, of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from sparkjax.config import child_environment

from . import worker
from .matcher import GrammarError
from .schema import SchemaError
from .sources import Source, Wanted
from .worker import Verdict, Vocabulary

SECONDS = 0.5
"""Seconds of a processor that building and trying one grammar may take."""
PATIENCE = 2.0
"""Seconds of the clock, where the processor has other work."""
START_SECONDS = 60.0
WORKERS = 2
WAITING = 64
"""Grammars that may wait for a worker."""
KEPT, KEPT_BYTES = 256, 16 << 20
"""Verdicts that are kept, and bytes of the constraints that they are about."""


class JudgeBusy(RuntimeError):
    """As many grammars wait as may."""


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, vocabulary: Vocabulary):
        environment = child_environment(OPENBLAS_NUM_THREADS="1", RAYON_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", worker.__name__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, start_new_session=True,  # a terminal's ^C is not for it
        )  # fmt: skip
        self._ask(msgspec.msgpack.encode(vocabulary), START_SECONDS)

    def judge(self, wanted: bytes) -> Verdict:
        return self._ask(wanted, PATIENCE, SECONDS)

    def _ask(self, payload: bytes, patience: float, seconds: float = math.inf) -> Verdict:
        """Raises BrokenPipeError (it is gone), TimeoutError or EOFError: it must be killed then.

        Args:
          patience: seconds of the clock.
          seconds: of a processor.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(worker.frame(payload))
        stdin.flush()
        begun, used, wait = time.monotonic(), self._processor_seconds(), min(seconds, patience)
        # An answer is written at once, so its first byte means that all of it comes.
        while not select.select([stdout], [], [], wait)[0]:
            left = min(
                patience - (time.monotonic() - begun),
                seconds - (self._processor_seconds() - used),
            )
            if left <= 0:
                raise TimeoutError
            wait = max(left, 0.02)
        return msgspec.msgpack.decode(worker.read(stdout), type=Verdict)

    def _processor_seconds(self) -> float:
        try:
            words = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):  # what was not written yet
            self._process.communicate()


class Judge:
    """Turns constraints into grammars. Any thread may call any method.

    Workers are started when they are first needed, unless `start` was called; one that is killed
    has a successor at once.
    """

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._workers: list[_Worker] = []  # the idle ones; each thread of the pool has one at most
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="judge")
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._bytes = self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    def source(self, wanted: Wanted) -> Future[Source]:
        """The grammar of a constraint. The future raises SchemaError or GrammarError.

        Raises:
          JudgeBusy: too many wait.
          GrammarError: the model has no end of an answer, or the text is none.
        """
        if not self._vocabulary.ends:
            raise GrammarError("the model has no token that ends an answer, which a grammar needs")
        try:
            key = msgspec.msgpack.encode(wanted)
        except UnicodeEncodeError:
            raise GrammarError("holds half of a surrogate pair, which is no text") from None
        except OverflowError:
            raise GrammarError("holds an integer of more than 64 bits") from None
        except RecursionError as error:
            raise GrammarError(str(error)) from None
        with self._lock:
            verdict = self._known.get(key)
            if verdict is not None:
                self._known.move_to_end(key)
                done: Future[Source] = Future()
                try:
                    done.set_result(_open(verdict))
                except (SchemaError, GrammarError) as error:
                    done.set_exception(error)
                return done
            if self._waiting >= WAITING:
                raise JudgeBusy(f"{WAITING} grammars wait already")
            self._waiting += 1
        return self._pool.submit(self._judge, key)

    def start(self) -> None:
        """Starts a worker before it is needed; returns at once."""
        self._pool.submit(self._start)

    def close(self) -> None:
        """Ends the processes."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for each in self._workers:
            each.kill()

    def _judge(self, key: bytes) -> Source:
        try:
            verdict = self._try(key)
        finally:
            with self._lock:
                self._waiting -= 1
        self._keep(key, verdict)
        return _open(verdict)

    def _try(self, key: bytes) -> Verdict:
        for _ in range(WORKERS + 1):
            with self._lock:
                found = self._workers.pop() if self._workers else None
            found = found or _Worker(self._vocabulary)
            try:
                verdict = found.judge(key)
            except BrokenPipeError:  # it was gone before it was asked: another one is
                found.kill()
            except (TimeoutError, EOFError) as error:
                found.kill()
                if not self._closed:
                    self._pool.submit(self._start)
                if isinstance(error, TimeoutError):
                    return Verdict(error=f"takes more than {SECONDS} s to build")
                return Verdict(error=f"needs more than {worker.MEMORY >> 20} MiB to build")
            else:
                with self._lock:
                    self._workers.append(found)
                return verdict
        raise RuntimeError("the processes that judge grammars end at once")

    def _start(self) -> None:
        with self._lock:
            if len(self._workers) >= WORKERS:
                return
        started = _Worker(self._vocabulary)
        with self._lock:
            self._workers.append(started)

    def _keep(self, key: bytes, verdict: Verdict) -> None:
        with self._lock:
            if key not in self._known:
                self._bytes += len(key)
            self._known[key] = verdict
            while len(self._known) > KEPT or (self._bytes > KEPT_BYTES and len(self._known) > 1):
                old, _ = self._known.popitem(last=False)
                self._bytes -= len(old)


def judge_of(tokenizer: Any, vocab: int, ends: Sequence[int]) -> Judge:
    """The judge of a `sparkjax.text.tokenizer.Tokenizer` under a model of `vocab` ids."""
    vocabulary = tokenizer.vocabulary
    special = {
        i: vocabulary.bytes_of(i) for i in vocabulary.control | vocabulary.special if i < vocab
    }
    return Judge(Vocabulary(vocab, special, tuple(i for i in ends if i < vocab)))


def _open(verdict: Verdict) -> Source:
    if verdict.source is not None:
        return verdict.source
    if verdict.path is not None:
        raise SchemaError(verdict.path, verdict.error)
    raise GrammarError(verdict.error)
