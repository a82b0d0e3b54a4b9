"""Pods as Linux has them: namespaces of network, host name, processes and mounts, in which containers' commands run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.manifests import Manifest, Pod, command, environment, host_names, is_allowed, named, pods
from tests.support.namespaces import unshare
from tests.support.waiting import eventually

_NODE = "10.42.0.1"
_SHORT_S = 0.2
_DEVICES = "null zero full random urandom tty"

_MOUNTS = f"""set -e
mount -t sysfs none /sys
mkdir -p "$SCRATCH/dev"
mount --rbind /dev "$SCRATCH/dev"
mount -t tmpfs -o mode=755 none /dev
for each in {_DEVICES}; do touch /dev/$each; mount --bind "$SCRATCH/dev/$each" /dev/$each; done
ln -s /proc/self/fd /dev/fd
mkdir /dev/shm
mount -t tmpfs none /mnt
mount --bind "$SCRATCH/hosts" /etc/hosts
touch "$TERMINATION_LOG"
mount --bind "$SCRATCH/termination-log" "$TERMINATION_LOG"
"""
"""What a container sees: its own devices, host names, and nothing in /mnt but its volumes."""


@dataclass(frozen=True)
class Place:
    """A network namespace.

    Attributes:
        address: of its only device beside loopback.
        enter: how a command begins that runs there.
    """

    address: str
    enter: tuple[str, ...]


@contextmanager
def joined_networks(names: Sequence[str]) -> Iterator[tuple[Place, dict[str, Place]]]:
    """Makes a network namespace for each name, with that host name, and one for the node, whose bridge joins them.

    Yields the node's, and the others by name. Skips where they may not be made.
    """
    missing = [each for each in ("ip", "nsenter", "setpriv", "curl", "ss") if shutil.which(each) is None]
    if missing:
        pytest.skip(f"pods are namespaces here, and what makes or asks them is missing: install {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("pods are namespaces here, which only root may join to one another: run this test as root")
    alone = [*unshare("--net", "--uts", "--ipc"), "sh", "-c", 'hostname "$1"; ip link set lo up; echo; exec cat', "sh"]

    with ExitStack() as undo:

        def place(name: str, address: str) -> tuple[Place, int]:
            process = undo.enter_context(
                subprocess.Popen([*alone, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            undo.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # it is there, with its own name
            enter = ("nsenter", f"--target={process.pid}", "--net", "--uts", "--ipc", "--")
            return Place(address, enter), process.pid

        def run(where: Place, *arguments: str) -> None:
            subprocess.run([*where.enter, "ip", *arguments], check=True)

        node, _ = place("node", _NODE)
        run(node, "link", "add", "pods", "type", "bridge")
        run(node, "address", "add", f"{_NODE}/24", "dev", "pods")
        run(node, "link", "set", "pods", "up")
        made = {}
        for number, name in enumerate(names, start=10):
            made[name], pid = place(name, f"10.42.0.{number}")
            run(node, "link", "add", f"pod{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            run(node, "link", "set", f"pod{number}", "master", "pods", "up")
            run(made[name], "address", "add", f"{made[name].address}/24", "dev", "eth0")
            run(made[name], "link", "set", "eth0", "up")
            run(made[name], "route", "add", "default", "via", _NODE)
        yield node, made


@dataclass
class RunningPod:
    """A pod whose container runs.

    Attributes:
        pod: as the manifests have it.
        place: where.
        node: where the kubelet asks from.
        process: begins the container; it has the container's status.
        variables: of the container.
        log: what it has said.
    """

    pod: Pod
    place: Place
    node: Place
    process: subprocess.Popen[bytes]
    variables: Mapping[str, str]
    log: Path
    scratch: Path

    @property
    def inside(self) -> int:
        """The number, here, of the container's first process."""
        return _children(self.process.pid)[0]

    def entered(self, *arguments: str) -> list[str]:
        """Returns the command line of a further program in the container."""
        enter = ["nsenter", f"--target={self.inside}", "--net", "--uts", "--ipc", "--mount", "--pid", "--"]
        return [*enter, *arguments]

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container."""
        return subprocess.run(
            self.entered(*arguments),
            env=dict(self.variables),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def started_beside(self, *arguments: str) -> Iterator[None]:
        """Has another program run in the container, and kills it at the end."""
        with subprocess.Popen(self.entered(*arguments), env=dict(self.variables)) as entering:
            eventually("it runs", lambda: _children(entering.pid))
            try:
                yield
            finally:
                os.kill(_children(entering.pid)[0], signal.SIGKILL)

    def probe(self, name: str) -> str:
        """Tries a probe once, as the kubelet does; says what failed, nothing if it succeeded."""
        probe = self.pod.container[name]
        limit = probe["timeoutSeconds"]
        if "exec" in probe:
            done = self.run(*probe["exec"]["command"], timeout_s=limit)
            return "" if done.returncode == 0 else f"{done.returncode}: {done.stdout}{done.stderr}"
        get = probe["httpGet"]
        url = f"http://{self.place.address}:{self.pod.port(get['port'])}{get['path']}"
        curl = ["curl", "--silent", "--show-error", "--max-time", str(limit), "--write-out", "\n%{http_code}", url]
        done = subprocess.run([*self.node.enter, *curl], capture_output=True, text=True, check=False)
        status = int(done.stdout.rpartition("\n")[2] or 0)
        return "" if 200 <= status < 400 else f"{url}: {done.stdout}{done.stderr}"

    def wait_ready(self, last_s: float) -> None:
        """Waits for its startup probe, then for readiness, and sees that it counts as live.

        Args:
            last_s: the longest wait, where the probes would allow longer.
        """
        deadline = time.monotonic() + last_s
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            while problem := self.probe(name):
                assert self.process.poll() is None, f"{self.pod.name} has ended"
                assert time.monotonic() < deadline, f"{self.pod.name}: {name}: {problem}"
                time.sleep(_SHORT_S)

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits for something while the container runs."""

        def is_so() -> bool:
            assert self.process.poll() is None, f"{self.pod.name} has ended:\n{self.said()}"
            return holds()

        eventually(f"{self.pod.name}: {what}", is_so)

    def terminate(self) -> float:
        """Ends it as the kubelet does: preStop, SIGTERM, and nothing harder. Returns how many seconds that took."""
        begun_at = time.monotonic()
        grace_s = self.pod.spec["terminationGracePeriodSeconds"]
        hook = self.pod.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            done = self.run(*hook["exec"]["command"], timeout_s=grace_s)
            assert done.returncode == 0, f"preStop of {self.pod.name}: {done.stdout}{done.stderr}"
        os.kill(self.inside, signal.SIGTERM)
        self.process.wait(max(0.0, begun_at + grace_s - time.monotonic()))
        return time.monotonic() - begun_at

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]


@dataclass
class RunningPods:
    """All pods of some manifests.

    Attributes:
        manifests: they.
        node: from where the kubelet asks.
        places: of pods, by name, whether anything runs there or not.
        running: those that were started, by name.
    """

    manifests: Sequence[Manifest]
    node: Place
    places: Mapping[str, Place]
    scratch: Path
    secrets: Mapping[str, Mapping[str, str]]
    image: Mapping[str, str]
    undo: ExitStack
    running: dict[str, RunningPod] = field(default_factory=dict)

    def start(self, pod: Pod, instead: Sequence[str] = ()) -> RunningPod:
        """Starts a pod's container.

        Args:
            instead: runs in place of the container's own command.
        """
        place, scratch = self.places[pod.name], self.scratch / pod.name
        scratch.mkdir()
        hosts = host_names(self.manifests, {name: each.address for name, each in self.places.items()})
        lines = ["127.0.0.1 localhost", f"{place.address} {pod.name}"]
        lines += [f"{address} {' '.join(sorted(names))}" for address, names in hosts.items() if names]
        (scratch / "hosts").write_text("\n".join(lines) + "\n")
        (scratch / "termination-log").touch()
        variables = environment(pod, self.manifests, place.address, self.secrets)
        script = _MOUNTS + "".join(self._volumes(pod, scratch)) + _privileges(pod) + '"$@"\n'
        around = {
            "SCRATCH": str(scratch),
            "TERMINATION_LOG": pod.container.get("terminationMessagePath", "/dev/termination-log"),
        }
        apart = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "--",
            "sh",
            "-c",
            script,
            "sh",
        ]
        log = scratch / "log"
        with log.open("wb") as output:
            process = self.undo.enter_context(
                subprocess.Popen(
                    [*place.enter, *apart, *(instead or command(pod.container, variables))],
                    env={**self.image, **variables, **around},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )
        self.undo.callback(process.kill)
        started = RunningPod(pod, place, self.node, process, {**self.image, **variables}, log, scratch)
        self.running[pod.name] = started
        return started

    def _volumes(self, pod: Pod, scratch: Path) -> Iterator[str]:
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        for mount in pod.container.get("volumeMounts", ()):
            volume, path = volumes[mount["name"]], mount["mountPath"]
            yield f"mkdir -p {path}\n"
            if "emptyDir" in volume:
                yield f"mount -t tmpfs none {path}\n"
                continue
            content = scratch / mount["name"]
            content.mkdir()
            for file, text in named(self.manifests, "ConfigMap", volume["configMap"]["name"])["data"].items():
                (content / file).write_text(text)
            yield f"mount --bind {content} {path}\nmount -o remount,bind,ro {path}\n"

    def ask(self, host: str, path: str, body: str | None = None, *, timeout_s: float = 60.0) -> str:
        """Asks a service or pod by its name, as a client that is in no pod; returns the answer of a success."""
        succeeded, said = self.answer(host, path, body, timeout_s=timeout_s)
        assert succeeded, f"{said}\n{self.said()}"
        return said

    def answer(self, host: str, path: str, body: str | None = None, *, timeout_s: float = 60.0) -> tuple[bool, str]:
        """As `ask`; returns whether it was a success, and what was said."""
        hosts = host_names(self.manifests, {name: each.address for name, each in self.places.items()})
        (address,) = (address for address, names in hosts.items() if host in names)
        port = 8080 if host == "gateway" else 8000
        curl = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", str(timeout_s)]
        curl += [] if body is None else ["--json", body]
        done = subprocess.run(
            [*self.node.enter, *curl, f"http://{address}:{port}{path}"], capture_output=True, text=True, check=False
        )
        return done.returncode == 0, done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def said(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"---- {each.pod.name}\n{each.said()}" for each in self.running.values())

    def flows(self) -> set[tuple[str, str, int]]:
        """Returns which pods have connected to which others: by whom, to whom, to which port.

        A question without the secret has a connection of its own, of which the one who answered keeps a trace.
        """
        names = {place.address: name for name, place in self.places.items()}
        found = set()
        for name, place in self.places.items():
            listening = self.listening(name)
            for port, peer in _sockets(place, "established") + _sockets(place, "time-wait"):
                if port in listening and peer in names and names[peer] != name:
                    found.add((names[peer], name, port))
        return found

    def listening(self, pod: str) -> set[int]:
        """Returns the ports that a pod's processes listen on."""
        return {port for port, _ in _sockets(self.places[pod], "listening")}

    def start_all(self, last_s: float) -> None:
        """Starts every pod as it stands, all at once as Kubernetes does, and waits until each is ready.

        Args:
            last_s: the longest wait.
        """
        deadline = time.monotonic() + last_s
        for pod in pods(self.manifests):
            self.start(pod)
        try:
            for started in self.running.values():
                started.wait_ready(deadline - time.monotonic())
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def terminate(self, *names: str) -> None:
        """Ends pods as the kubelet does, all at once; every one if none is named."""
        ending = [pod for name, pod in self.running.items() if name in names or not names]
        with ThreadPoolExecutor(len(ending)) as kubelets:
            try:
                list(kubelets.map(RunningPod.terminate, ending))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise AssertionError(f"{error}\n{self.said()}") from None

    def metric(self, pod: str, name: str) -> float:
        """Returns the sum of a metric of a pod's endpoint, over all labels."""
        url = f"http://{self.places[pod].address}:9470/metrics"
        said = subprocess.run(
            [*self.node.enter, "curl", "--silent", "--fail", url], capture_output=True, text=True, check=True
        ).stdout
        return sum(float(line.split()[-1]) for line in said.splitlines() if line.split("{")[0].split()[0] == name)

    def closed_flows(self) -> set[tuple[str, str, int]]:
        """Returns those of them that the network policies would not have let through."""
        known = {pod.name: pod for pod in pods(self.manifests)}
        return {
            (source, target, port)
            for source, target, port in self.flows()
            if not is_allowed(self.manifests, known[source], known[target], port)
        }


def image_of_this_environment(*path: Path) -> dict[str, str]:
    """Returns what containers would have from an image with this environment in it.

    Args:
        path: where Python looks for modules beside it.
    """
    programs = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return {
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/root",
    }


def _children(pid: int) -> list[int]:
    """Returns the numbers of a process's children; unshare and nsenter have one, the program that they begin."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _privileges(pod: Pod) -> str:
    """How a container's command begins: without capabilities, as the security contexts say.

    Left out are the filter of system calls, another user, and a root file system that nobody writes to.
    """
    context = {**pod.spec.get("securityContext", {}), **pod.container["securityContext"]}
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    return "exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "


def _sockets(place: Place, state: str) -> list[tuple[int, str]]:
    """Returns the own port and the peer's address of every TCP socket in a state."""
    listed = subprocess.run(
        [*place.enter, "ss", "-H", "-t", "-n", "state", state], capture_output=True, text=True, check=True
    ).stdout
    found = []
    for line in listed.splitlines():
        local, peer = line.split()[2:4]
        found.append((int(local.rpartition(":")[2]), peer.rpartition(":")[0].strip("[]").removeprefix("::ffff:")))
    return found


@contextmanager
def running(
    manifests: Sequence[Manifest], scratch: Path, image: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]
) -> Iterator[RunningPods]:
    """Makes a place for every pod of some manifests, for as long as they are needed. Nothing runs there yet.

    Args:
        scratch: a directory for their files.
        image: variables that containers have from their image.
        secrets: by name and key.
    """
    names = [pod.name for pod in pods(manifests)]
    with joined_networks(names) as (node, places), ExitStack() as undo:
        yield RunningPods(manifests, node, places, scratch, secrets, image, undo)
