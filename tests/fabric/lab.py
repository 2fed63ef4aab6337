"""Two emulated hosts with an RDMA device a rail (Soft-RoCE), on a machine without any.

Each host is a qemu machine without acceleration (KVM may hang where machines are nested) that runs
Debian's kernel with this machine's files, read-only, under an overlay in memory: whatever program
and environment is here is there. Rail n is a network card of its own, joined to the same card of
the other host, with `rdma_rxe` on it as rxen and the address 10.77.n.(host + 1). A folder of this
machine (`SHARE` there) carries jobs in and results out.

    with Lab(folder) as lab:
        jobs = [lab.start(host, "hostname") for host in range(HOSTS)]
        codes_and_outputs = [job.wait(60) for job in jobs]

Emulated processors are slow: this says what is right, never what is fast.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOSTS = RAILS = 2
SHARE = Path("/mnt")
NEEDED = {
    "qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "cpio": "cpio",
    "modprobe": "kmod", "rdma": "iproute2",
}  # fmt: skip
# crc32_generic comes before rdma_rxe, which otherwise makes no device and says nothing.
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay", "crc32_generic", "rdma_rxe",
           "ib_uverbs")  # fmt: skip
SBIN = "/usr/sbin:/usr/bin:/sbin:/bin"

# The first process of a host: mounts, modules, and on to `HOST` inside the overlay.
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module; done 2>/dev/null
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro files /lower
mount -t tmpfs -o size=1500m upper /upper; mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work both /root
for place in proc sys dev; do mount --move /$place /root/$place; done
mkdir -p /root/dev/shm; mount -t tmpfs shm /root/dev/shm; mount -t tmpfs run /root/run
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=none share /root/mnt
ip link set lo up
host=$(sed 's/.*lab_host=\\([0-9]*\\).*/\\1/' /root/proc/cmdline)
HOST=$host exec chroot /root /bin/bash /mnt/host.sh
"""
# What a host does: its rails, then every job that appears, each on its own.
HOST = """export PATH=@PATH@ HOME=/root TERM=dumb; ulimit -l unlimited; hostname host$HOST
for rail in $(seq 0 @LAST_RAIL@); do
  ip link set eth$rail mtu 4200 up; ip addr add 10.77.$rail.$((HOST + 1))/24 dev eth$rail
  rdma link add rxe$rail type rxe netdev eth$rail
done
touch /mnt/ready.$HOST; next=0
while [ ! -e /mnt/stop ]; do
  if [ -e /mnt/job.$HOST.$next.sh ]; then
    (bash /mnt/job.$HOST.$next.sh > /mnt/job.$HOST.$next.out 2>&1 < /dev/null
     echo $? > /mnt/code.$HOST.$next; mv /mnt/code.$HOST.$next /mnt/job.$HOST.$next.code) &
    next=$((next + 1))
  else sleep 0.1; fi
done
sync; echo o > /proc/sysrq-trigger; sleep 5
"""


class LabError(RuntimeError):
    """The lab cannot be built, does not boot, or a job does not end; says what and where to look."""


def missing() -> str:
    """The Debian packages that are not here, in words; or ""."""
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    names = {package for program, package in NEEDED.items() if not shutil.which(program, path=path)}
    if not _kernels():
        names.add("linux-image-amd64")
    if not Path("/usr/include/infiniband/verbs.h").exists():
        names.add("libibverbs-dev")
    if not Path("/usr/lib/python3/dist-packages/pyverbs").exists():
        names.add("python3-pyverbs")
    if not list(Path("/etc/libibverbs.d").glob("*")):
        names.add("ibverbs-providers")
    return f"apt-get install -y --no-install-recommends {' '.join(sorted(names))}" if names else ""


def _kernels() -> list[str]:
    """Versions of kernels that have both an image and modules here, oldest first."""
    found = [
        p.name for p in Path("/lib/modules").glob("*") if Path(f"/boot/vmlinuz-{p.name}").exists()
    ]
    return sorted(
        found, key=lambda name: [int(x) for x in name.replace("-", ".").split(".") if x.isdigit()]
    )


def make_initrd(kernel: str, to: Path) -> None:
    """An archive with busybox, the modules in the order of their dependencies, and INIT."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("bin", "proc", "sys", "dev", "modules", "lower", "upper", "root"):
            (root / name).mkdir()
        shutil.copy(
            shutil.which("busybox", path=f"/bin:{SBIN}") or "/bin/busybox", root / "bin/busybox"
        )
        order: list[str] = []
        for module in MODULES:
            command = ["modprobe", "-S", kernel, "--show-depends", module]
            shown = subprocess.run(command, capture_output=True, text=True, check=True,
                                   env={"PATH": SBIN}).stdout  # fmt: skip
            files = [line.split()[1] for line in shown.splitlines() if line.startswith("insmod")]
            for file in files:
                if Path(file).name not in order:
                    order.append(Path(file).name)
                    shutil.copy(file, root / "modules")
        (root / "modules/order").write_text("\n".join(order))
        (root / "init").write_text(INIT)
        (root / "init").chmod(0o755)
        names = "\n".join(str(p.relative_to(root)) for p in sorted(root.rglob("*")))
        archive = subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(),
                                 cwd=root, capture_output=True, check=True).stdout  # fmt: skip
        to.write_bytes(gzip.compress(archive, 1))


class Job:
    """A command that runs on a host."""

    def __init__(self, share: Path, name: str):
        self._share, self._name = share, name

    @property
    def output(self) -> str:
        path = self._share / f"{self._name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def done(self) -> bool:
        return (self._share / f"{self._name}.code").exists()

    def wait(self, seconds: float) -> tuple[int, str]:
        """(exit code, output). Raises LabError after `seconds`, with the output so far."""
        until = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() > until:
                raise LabError(
                    f"{self._name} did not end in {seconds:.0f} s; it wrote:\n{self.output}"
                )
            time.sleep(0.05)
        return int((self._share / f"{self._name}.code").read_text()), self.output


class Lab:
    """The hosts, from entry to exit. `folder` is emptied but for `keep`, which outlives a lab."""

    def __init__(self, folder: Path, boot_seconds: float = 240.0):
        self.folder, self._boot_seconds = folder, boot_seconds
        self._hosts: list[subprocess.Popen] = []
        self._jobs = [0] * HOSTS

    def __enter__(self) -> Lab:
        if what := missing():
            raise LabError(f"the lab needs: {what}")
        (self.folder / "keep").mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name != "keep":
                path.unlink()
        script = HOST.replace("@PATH@", SBIN).replace("@LAST_RAIL@", str(RAILS - 1))
        (self.folder / "host.sh").write_text(script)
        kernel = _kernels()[-1]
        make_initrd(kernel, self.folder / "initrd.gz")
        try:
            for host in range(HOSTS):
                self._hosts.append(self._boot(host, kernel))
                time.sleep(1.0 if host == 0 else 0.0)  # the first one listens for the cables' ends
            until = time.monotonic() + self._boot_seconds
            while not all((self.folder / f"ready.{host}").exists() for host in range(HOSTS)):
                if time.monotonic() > until or any(p.poll() is not None for p in self._hosts):
                    raise LabError(f"the hosts did not come up: {self.folder}/console.*")
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "stop").touch()
        for process in self._hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def start(self, host: int, command: str) -> Job:
        """Runs a bash command on a host, beside whatever runs there."""
        name = f"job.{host}.{self._jobs[host]}"
        self._jobs[host] += 1
        (self.folder / f"{name}.part").write_text(command + "\n")
        (self.folder / f"{name}.part").rename(self.folder / f"{name}.sh")
        return Job(self.folder, name)

    def _boot(self, host: int, kernel: str) -> subprocess.Popen:
        command = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
            "-m", "3G", "-nographic", "-no-reboot", "-kernel", f"/boot/vmlinuz-{kernel}",
            "-initrd", str(self.folder / "initrd.gz"),
            "-append", f"console=ttyS0 quiet panic=-1 lab_host={host}",
        ]  # fmt: skip
        for path, tag, mode in (("/", "files", "readonly=on,"), (self.folder, "share", "")):
            command += ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none,{mode}"
                        "multidevs=remap"]  # fmt: skip
        for rail in range(RAILS):
            end = "listen" if host == 0 else "connect"
            command += [
                "-netdev", f"socket,id=net{rail},{end}=127.0.0.1:{_port(self.folder, rail)}",
                "-device", f"virtio-net-pci,netdev=net{rail},mac=52:54:00:00:{rail:02x}:{host:02x}",
            ]  # fmt: skip
        console = (self.folder / f"console.{host}").open("wb")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)


def _port(folder: Path, rail: int) -> int:
    """A port of this machine for a cable; labs in different folders use different ones."""
    return 20_000 + (hash_of(str(folder)) % 5_000) * RAILS + rail


def hash_of(text: str) -> int:
    """The same number for the same text in every process."""
    return int.from_bytes(text.encode()[-8:], "big") * 2654435761 >> 7


def install() -> int:
    """Installs what is missing, as root on Debian; else says what it is. The exit code."""
    what = missing()
    if what and (os.geteuid() or not shutil.which("apt-get")):
        print(f"the lab needs packages: {what}")
        return 1
    if what:
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("apt-get update -qq", what.replace("install", "install -qq", 1)):
            if code := subprocess.run(command.split(), env=environ, check=False).returncode:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(install())
