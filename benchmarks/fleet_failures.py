"""Real servers behind the gateway, paused, killed, stopped, restarted and overloaded while clients run.

    python benchmarks/fleet_failures.py [--vllm PATH/TO/bin/vllm] [--kv-events] [--json FILE]

Two `caudex serve` and, if asked for, a vLLM, with the default model. Clients ask for greedy answers, which are compared
with those that the servers gave beforehand: every answer must be right, or end with an error event behind a right
beginning, or be an error status; none may take longer than PATIENCE. Only while the gateway itself is restarted may a
connection be refused. A text that no server gave beforehand is kept with the worker that gave it, which is then asked
for it alone, in companies of all sizes: it is wrong unless that worker gives it too. At the end the gateway's own
account, its access log, must have exactly the answers that the clients had. With --kv-events the policy is
prefix_exact, by the servers' KV events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caudex.bench.client import Endpoint, ServerError, events, first_model, read_usage, texts
from caudex.bench.client import Record as UsageRecord
from caudex.bench.local import free_port
from caudex.engine.loading import locate_checkpoint

QUESTIONS = 12
CLIENTS = 6
CROWD = 60
"""Clients at once in the overload; the gateway takes 8 requests a worker and lets 8 wait."""
PATIENCE = 300.0
SYSTEM = "You are a terse assistant. " * 20
ADMIN_KEY = "k"
NO_GATEWAY = "no gateway"
BLOCK = "32"
"""Tokens a block: what vLLM's CPU backend needs, and equal for all, as exact routing needs it."""


class Server:
    """A server that can be started again on its port. Its KV events are at port + 1, their replay at port + 2."""

    def __init__(self, command: list[str], port: int, log: Path, environment: dict[str, str] | None = None) -> None:
        self.command, self.log = command, log
        self.url = f"http://127.0.0.1:{port}"
        self.environment = os.environ | (environment or {})
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)

    def answers(self) -> bool:
        """Whether it serves; RuntimeError, with its last words, if it has ended by itself."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.command[:3]} ended:\n{self.log.read_text()[-2_000:]}")
        return page(f"{self.url}/v1/models") != ""

    def send(self, number: signal.Signals) -> None:
        """To the process and its children: vLLM computes in one of those."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, number: signal.Signals) -> None:
        self.send(number)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.end(signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # It has just ended.
        return []
    return children + [below for child in children for below in descendants(child)]


def caudex(port: int, log: Path) -> Server:
    publish = ["--kv-events-endpoint", f"tcp://127.0.0.1:{port + 1}"]
    replay = ["--kv-events-replay-endpoint", f"tcp://127.0.0.1:{port + 2}"]
    sizes = ["--num-blocks", "300", "--block-size", BLOCK]
    command = [sys.executable, "-m", "caudex", "serve", "--port", str(port), *sizes, *publish, *replay]
    return Server(command, port, log)


def vllm(program: str, port: int, log: Path) -> Server:
    # With an address and no * it would connect there, not listen.
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port + 1}"}
    publish["replay_endpoint"] = f"tcp://*:{port + 2}"
    sizes = ["--block-size", BLOCK, "--num-gpu-blocks-override", "300", "--max-model-len", "4096"]
    modes = ["--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"]
    name = ["--served-model-name", "SmolLM2-135M-Instruct", "--kv-events-config", json.dumps(publish)]
    command = [program, "serve", str(locate_checkpoint(None).directory), "--port", str(port), *sizes, *modes, *name]
    return Server(command, port, log, {"VLLM_CPU_KVCACHE_SPACE": "2"})


def page(url: str) -> str:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return str(answer.read().decode())
    return ""


async def until(condition: Callable[[], bool], what: str, seconds: float = 900.0) -> float:
    """Seconds until the condition held."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"waited {seconds} s in vain for {what}")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@dataclass
class Answer:
    """How it ended ("whole", or what the error said), its text, what it used, and the server's name for it."""

    ending: str = "whole"
    text: str = ""
    usage: UsageRecord = field(default_factory=lambda: UsageRecord(first=False))
    id: str = ""


async def ask(endpoint: Endpoint, question: int) -> Answer:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Count from {question} upward."},
    ]
    body = {"model": endpoint.model, "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    answer = Answer()
    try:
        async with asyncio.timeout(PATIENCE):
            async for _, chunk in events(endpoint, "/v1/chat/completions", body):
                answer.text += "".join(texts(chunk))
                answer.id = chunk.get("id", "")
                read_usage(answer.usage, chunk)
    except TimeoutError:
        answer.ending = "HUNG"
    except ConnectionError as error:
        answer.ending = str(error) if answer.text else NO_GATEWAY
    except (ServerError, OSError, EOFError) as error:
        answer.ending = str(error) or type(error).__name__
    return answer


async def answers_of(endpoint: Endpoint, companies: Sequence[int]) -> list[set[str]]:
    """What a server itself answers, by question, asked in companies of these sizes: the greedy answers of an engine
    that rounds differently in larger batches, or after a hit, are not always the same."""
    given: list[set[str]] = [set() for _ in range(QUESTIONS)]
    for company in companies:
        for first in range(0, QUESTIONS, company):
            questions = range(first, min(first + company, QUESTIONS))
            answers = await asyncio.gather(*[ask(endpoint, question) for question in questions])
            for question, answer in zip(questions, answers, strict=True):
                if answer.ending != "whole":
                    raise RuntimeError(f"{endpoint.url} answers {answer.ending}")
                given[question].add(answer.text)
    return given


async def right_answers(endpoints: list[Endpoint]) -> list[set[str]]:
    """What the servers answer beforehand, by question."""
    given = [await answers_of(endpoint, (1, CLIENTS, CLIENTS, QUESTIONS, QUESTIONS)) for endpoint in endpoints]
    return [set[str]().union(*by_server) for by_server in zip(*given, strict=True)]


def verdict(ending: str, text: str, right: set[str]) -> str:
    if ending == "whole":
        return "right" if text in right else "WRONG"
    if ending.startswith("error in the stream"):
        return "told" if any(answer.startswith(text) for answer in right) else "WRONG"
    status = re.match(r"status (\d+)", ending)
    if status is not None and status[1] in ("429", "502", "503"):
        return f"refused with {status[1]}"
    return ending if ending in ("HUNG", NO_GATEWAY) else f"SILENT CUT: {ending}"


class Clients:
    """Clients that ask without end, and what became of every question, by phase."""

    def __init__(self, endpoint: Endpoint, right: list[set[str]]) -> None:
        self.endpoint, self.right = endpoint, right
        self.phases: dict[str, dict[str, Any]] = {}
        self.all: Counter[str] = Counter()
        self.reported_cached = 0
        self.wrong: list[dict[str, Any]] = []

    async def during(self, name: str, count: int, events: Awaitable[dict[str, float]]) -> None:
        """Runs so many clients while something happens, and until each has its last answer."""
        verdicts: Counter[str] = Counter()
        slowest: dict[str, float] = {}
        over = False

        async def client(first: int) -> None:
            question = first
            while not over:
                began = time.monotonic()
                answer = await ask(self.endpoint, question % QUESTIONS)
                right = self.right[question % QUESTIONS]
                what = verdict(answer.ending, answer.text, right)
                verdicts[what] += 1
                slowest[what] = round(max(slowest.get(what, 0.0), time.monotonic() - began), 2)
                if what == "WRONG":
                    told = {"question": question % QUESTIONS, "text": answer.text, "id": answer.id}
                    self.wrong.append({**told, "right": sorted(right)})
                self.reported_cached += answer.usage.cached_tokens or 0
                question += count
                if answer.ending.startswith("status") or answer.ending == NO_GATEWAY:
                    await asyncio.sleep(0.2)

        clients = [asyncio.create_task(client(i)) for i in range(count)]
        try:
            times = await events
        finally:
            over = True
        await asyncio.gather(*clients)
        self.all += verdicts
        self.phases[name] = {"verdicts": dict(verdicts), "slowest_seconds": slowest, **times}
        print(name, json.dumps(self.phases[name]), flush=True)


class Drama:
    """What happens to the servers. Each act ends with all servers available again."""

    def __init__(self, servers: list[Server], gateway: Server, access_log: Path) -> None:
        self.servers, self.gateway, self.access_log = servers, gateway, access_log

    def available(self) -> int:
        return int(json.loads(page(f"{self.gateway.url}/health") or "{}").get("available", 0))

    async def all_available(self) -> float:
        return await until(lambda: self.available() == len(self.servers), "all servers to be available")

    async def nothing(self) -> dict[str, float]:
        await asyncio.sleep(10)
        return {}

    async def paused(self, server: Server) -> dict[str, float]:
        server.send(signal.SIGSTOP)
        await asyncio.sleep(10)
        server.send(signal.SIGCONT)
        return {"seconds_to_traffic": round(await self.all_available(), 2)}

    async def restarted(self) -> dict[str, float]:
        """The gateway, in good order: it knows from its snapshot what the servers have."""
        await asyncio.to_thread(self.gateway.end, signal.SIGTERM)
        known = len(answers_in(self.access_log))
        self.gateway.start()
        await until(self.gateway.answers, "the gateway to start again")
        await self.all_available()
        await asyncio.sleep(5)
        first = answers_in(self.access_log)[known]
        return {"cached_tokens_predicted_for_the_first": first.get("predicted_cached_tokens", 0)}

    async def drained(self, server: Server) -> dict[str, float]:
        """Finishes what it has, gets nothing new, and is taken back."""
        await asyncio.to_thread(self.admin, "/drain", server)
        drained_at = time.time()
        seconds = await until(lambda: self.in_flight(server) == 0, "a server to be drained")
        await asyncio.sleep(5)
        there = [line["time"] for line in answers_in(self.access_log) if line.get("worker") == server.url]
        await asyncio.to_thread(self.admin, "", server)
        await self.all_available()
        return {"seconds_to_drain": round(seconds, 2), "sent_there_meanwhile": sum(at > drained_at for at in there)}

    def admin(self, command: str, server: Server) -> None:
        body = json.dumps({"url": server.url}).encode()
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        request = urllib.request.Request(f"{self.gateway.url}/admin/workers{command}", body, headers)
        urllib.request.urlopen(request, timeout=10).close()

    def in_flight(self, server: Server) -> float:
        return total(page(f"{self.gateway.url}/metrics"), "caudex_gateway_worker_in_flight", server.url)

    async def all_ended(self) -> dict[str, float]:
        """No server is left, for a while."""
        for server in self.servers:
            await asyncio.to_thread(server.end, signal.SIGKILL)
        seconds = await until(lambda: self.available() == 0, "all servers to be known as dead")
        await asyncio.sleep(5)
        for server in self.servers:
            server.start()
        for server in self.servers:
            await until(server.answers, "a server to start again")
        back = await self.all_available()
        await asyncio.sleep(3)
        return {"seconds_to_notice": round(seconds, 2), "seconds_to_traffic": round(back, 2)}

    async def ended(self, server: Server, number: signal.Signals) -> dict[str, float]:
        """Ended and started again; the time counts from when the server itself is ready."""
        await asyncio.to_thread(server.end, number)
        await asyncio.sleep(3)
        server.start()
        await until(server.answers, "a server to start again")
        seconds = await self.all_available()
        await asyncio.sleep(3)
        return {"seconds_to_traffic": round(seconds, 2)}


async def play(servers: list[Server], gateway: Server, access_log: Path) -> dict[str, Any]:
    drama = Drama(servers, gateway, access_log)
    for server in servers:
        await until(server.answers, "the servers to start")
    await drama.all_available()
    model = await first_model(Endpoint(servers[0].url, ""))
    right = await right_answers([Endpoint(server.url, model) for server in servers])
    clients = Clients(Endpoint(gateway.url, model), right)
    first, last = servers[0], servers[-1]
    await clients.during("calm", CLIENTS, drama.nothing())
    await clients.during("the gateway restarted", CLIENTS, drama.restarted())
    await clients.during("one drained", CLIENTS, drama.drained(first))
    await clients.during("one paused", CLIENTS, drama.paused(last))
    await clients.during("the other paused", CLIENTS, drama.paused(first))
    await clients.during("one killed", CLIENTS, drama.ended(first, signal.SIGKILL))
    await clients.during("one stopped in good order", CLIENTS, drama.ended(first, signal.SIGTERM))
    await clients.during("overloaded", CROWD, drama.nothing())
    await clients.during("the other killed", CLIENTS, drama.ended(last, signal.SIGKILL))
    await clients.during("all killed", CLIENTS, drama.all_ended())
    await asyncio.sleep(2)
    report = {"phases": clients.phases, "total": dict(clients.all), **account(clients, gateway.url, access_log)}
    return report | {"wrong": await explained(clients.wrong, access_log, model)}


async def explained(wrong: list[dict[str, Any]], access_log: Path, model: str) -> list[dict[str, Any]]:
    """Each text that none gave beforehand with the worker that gave it, as far as its name for the answer has the
    gateway's for the request in it, and whether the same worker, asked alone, gives that text as well."""
    by_id = {line["request_id"]: line["worker"] for line in answers_in(access_log) if line.get("worker")}
    alone: dict[str, list[set[str]]] = {}
    for answer in wrong:
        answer["worker"] = next((url for name, url in by_id.items() if name in answer["id"]), None)
    for url in {answer["worker"] for answer in wrong} - {None}:
        alone[url] = await answers_of(Endpoint(url, model), [*range(1, QUESTIONS + 1)] * 4)
    for answer in wrong:
        given = alone.get(answer["worker"])
        answer["given_alone"] = given is not None and answer["text"] in given[answer["question"]]
    return wrong


def account(clients: Clients, gateway: str, access_log: Path) -> dict[str, Any]:
    """Whether the gateway's account agrees with its clients', and what it believed of the servers' caches."""
    answers = answers_in(access_log)
    theirs = Counter(
        name.removeprefix("refused with ") if "refused" in name else "200"
        for name in clients.all.elements()
        if name != NO_GATEWAY and "without an answer" not in name
    )
    metrics = page(f"{gateway}/metrics")
    return {
        "statuses_by_clients": dict(theirs),
        "statuses_by_gateway": dict(Counter(str(line["status"]) for line in answers)),
        "cached_tokens_by_clients": clients.reported_cached,
        "cached_tokens_by_gateway": sum(line.get("reported_cached_tokens") or 0 for line in answers),
        "predicted_cached_tokens": sum(
            line.get("predicted_cached_tokens", 0) for line in answers if "reported_cached_tokens" in line
        ),
        "retries": sum(max(0, line.get("attempts", 0) - 1) for line in answers),
        "in_flight_at_the_end": total(metrics, "caudex_gateway_worker_in_flight"),
        "index_drops_since_the_restart": {
            cause: total(metrics, "caudex_gateway_index_drops_total", cause) for cause in ("restart", "drift")
        },
    }


def answers_in(access_log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in access_log.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["path"] == "/v1/chat/completions"]


def total(metrics: str, name: str, label: str = "") -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def faults(report: dict[str, Any]) -> list[str]:
    fine = ("right", "told", "WRONG", NO_GATEWAY)
    bad = [name for name in report["total"] if name not in fine and not name.startswith("refused")]
    without = [name for name, phase in report["phases"].items() if NO_GATEWAY in phase["verdicts"]]
    bad += [f"connections were refused: {name}" for name in without if name != "the gateway restarted"]
    bad += [f"wrong: {answer}" for answer in report["wrong"] if not answer["given_alone"]]
    off = [
        what for what in ("statuses", "cached_tokens") if report[f"{what}_by_clients"] != report[f"{what}_by_gateway"]
    ]
    bad += [f"{what} do not add up" for what in off]
    return bad + (["requests are still in flight"] if report["in_flight_at_the_end"] else [])


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        servers = [
            caudex(free_port(in_a_row=3), folder / "first.log"),
            caudex(free_port(in_a_row=3), folder / "second.log"),
        ]
        if args.vllm:
            servers.append(vllm(args.vllm, free_port(in_a_row=3), folder / "vllm.log"))
        for server in servers:
            stack.callback(server.close)
        access_log = folder / "access.log"
        options = [part for server in servers for part in ("--worker", server.url)]
        options += ["--max-concurrency", "8", "--max-queue", "8", "--access-log", str(access_log)]
        if args.kv_events:
            options += ["--kv-events", "tcp://*:+1", "--kv-replay", "tcp://*:+2", "--policy", "prefix_exact"]
            options += ["--tokenizer", str(locate_checkpoint(None).directory)]
        options += ["--snapshot", str(folder / "routing"), "--admin-key", ADMIN_KEY, "--log-level", "warning"]
        port = free_port()
        command = [sys.executable, "-m", "caudex", "route", *options, "--port", str(port)]
        gateway = Server(command, port, folder / "gateway.log")
        stack.callback(gateway.close)
        return await play(servers, gateway, access_log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="path of the program vllm, to run one of it too")
    parser.add_argument("--kv-events", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run(args, Path(folder)))
    print(json.dumps({name: value for name, value in report.items() if name != "phases"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    bad = faults(report)
    sys.exit(f"not as promised: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
