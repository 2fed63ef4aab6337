"""pyverbs: devices, GIDs, memory registration, and reliable queue pairs from birth to connection.

pyverbs is the distribution's package (python3-pyverbs), since it has to match its libibverbs. It is
imported when a fabric is opened or checked, from the distribution's folder where the environment
does not show it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec

from .. import TransportError
from . import native
from .devices import Device, Gid

DISTRIBUTION = Path("/usr/lib/python3/dist-packages")
PORT = 1
"""Of a RoCE device; it has one."""
SEND_DEPTH = 128
INLINE = 64
TIMEOUT = 17
"""4.096 us * 2 ** 17, about half a second, for an acknowledgement, RETRIES times."""
RETRIES = 7


class Face(msgspec.Struct, frozen=True):
    """What the other end of a link has to know of this one."""

    peer: int
    rail: int
    device: str
    gid: str
    mtu: int
    number: int
    sequence: int
    address: int
    key: int


def load(folder: Path = DISTRIBUTION) -> Any:
    """The package pyverbs. Raises TransportError saying what to install or which Python to take."""
    if "pyverbs" not in sys.modules:
        spec = importlib.util.find_spec("pyverbs")
        spec = spec or importlib.machinery.PathFinder.find_spec("pyverbs", [str(folder)])
        if spec is None or spec.loader is None:
            raise TransportError(
                "fabric: pyverbs is not installed (apt-get install python3-pyverbs rdma-core)"
            )
        places = [Path(p) for p in spec.submodule_search_locations or ()]
        built = {found[1] for place in places for file in place.glob("device.cpython-*.so")
                 if (found := re.search(r"cpython-3(\d+)", file.name))}  # fmt: skip
        minor = str(sys.version_info.minor)
        if minor not in built:
            raise TransportError(
                f"fabric: pyverbs in {places[0] if places else folder} is for Python "
                f"{', '.join(f'3.{m}' for m in sorted(built)) or '?'}, and this is 3.{minor}: make "
                "the environment with the distribution's own python3"
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules["pyverbs"] = module
        spec.loader.exec_module(module)
    try:
        import pyverbs.addr
        import pyverbs.cq
        import pyverbs.device
        import pyverbs.mr
        import pyverbs.pd
        import pyverbs.qp
    except ImportError as error:
        raise TransportError(f"fabric: pyverbs cannot be imported: {error}") from error
    return pyverbs


def devices() -> list[Device]:
    """The RDMA devices of this host, by name. Raises TransportError."""
    pyverbs = load()
    enums, error = pyverbs.enums, pyverbs.pyverbs_error.PyverbsError
    try:
        names = sorted(device.name.decode() for device in pyverbs.device.get_device_list())
        found = []
        for name in names:
            context = pyverbs.device.Context(name=name)
            port = context.query_port(PORT)
            gids = []
            for index in range(min(port.gid_tbl_len, 256)):
                try:
                    value = str(context.query_gid(PORT, index))
                    kind = context.query_gid_type(PORT, index)
                except error:
                    continue
                if value.replace(":", "").strip("0"):
                    gids.append(Gid(index, value, kind == enums.IBV_GID_TYPE_SYSFS_ROCE_V2))
            active = port.state == enums.IBV_PORT_ACTIVE
            found.append(Device(name, active, 128 << port.active_mtu, tuple(gids), place(name)))
            context.close()
    except error as said:
        raise TransportError(f"fabric: RDMA devices cannot be read: {said}") from said
    return found


def place(name: str, root: Path = Path("/sys/class/infiniband")) -> str:
    """A device's PCI address, such as "0002:01:00.0", or ""."""
    link = root / name / "device"
    address = link.resolve().name if link.exists() else ""
    return (
        address if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", address) else ""
    )


class Ends:
    """The queue pairs of one world, over the registered picture of its slots.

    Args:
      library: the data plane (native.load), loaded before pyverbs.
      base, size: the memory to be registered.
      places: a (device, GID) a port; links of a port share the device.

    Raises:
      TransportError: naming the device.
    """

    def __init__(self, library: Any, base: int, size: int, places: list[tuple[Device, Gid]]):
        self._verbs = load()
        self._library, self._base = library, base
        self._ports = []
        enums = self._verbs.enums
        self._access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        self._pairs: list[tuple[int, Any, Any, int]] = []
        shared: dict[str, tuple[Any, Any, Any]] = {}
        for device, gid in places:
            if device.name not in shared:
                shared[device.name] = self._register(device.name, size)
            self._ports.append((device, gid, *shared[device.name]))

    def _register(self, name: str, size: int) -> tuple[Any, Any, Any]:
        v = self._verbs
        try:
            context = v.device.Context(name=name)
            domain = v.pd.PD(context)
            region = v.mr.MR(domain, size, self._access, address=self._base)
            return context, domain, region
        except v.pyverbs_error.PyverbsError as error:
            raise TransportError(
                f"fabric: {name}: {size >> 20} MiB cannot be registered: {error} (is the limit of "
                "locked memory, ulimit -l, large enough?)"
            ) from error

    def create(self, peer: int, rail: int, port: int) -> Face:
        """A new queue pair towards `peer`."""
        v = self._verbs
        device, gid, context, domain, region = self._ports[port]
        room = v.qp.QPCap(SEND_DEPTH, 1, 1, 1, INLINE)
        try:
            queue = v.cq.CQ(context, 2 * SEND_DEPTH)
            wanted = v.qp.QPInitAttr(
                qp_type=v.enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=room, sq_sig_all=0
            )
            pair = v.qp.QP(domain, wanted)
            attributes = v.qp.QPAttr(port_num=PORT)
            # Here and not later: without them the other end's writes are invalid requests.
            attributes.qp_access_flags = self._access
            pair.to_init(attributes)
        except v.pyverbs_error.PyverbsError as error:
            raise TransportError(f"fabric: {device.name}: no queue pair: {error}") from error
        pointer = self._library.sparkjax_fabric_queue_pair(pair.qp_num)
        if not pointer:
            raise TransportError(
                "fabric: the queue pair that pyverbs made was not seen: pyverbs was imported before "
                "the fabric's own library"
            )
        self._pairs.append((port, pair, queue, pointer))
        sequence = secrets.randbits(24)
        return Face(peer, rail, device.name, gid.value, device.mtu, pair.qp_num, sequence,
                    self._base, region.rkey)  # fmt: skip

    def connect(self, at: int, mine: Face, theirs: Face) -> native.End:
        """Queue pair number `at` (in the order of `create`) to its other end."""
        v = self._verbs
        port, pair, _, pointer = self._pairs[at]
        device, gid, _, _, region = self._ports[port]
        attributes = v.qp.QPAttr(port_num=PORT)
        attributes.qp_access_flags = self._access
        attributes.dest_qp_num, attributes.rq_psn = theirs.number, theirs.sequence
        attributes.path_mtu = min(mine.mtu, theirs.mtu).bit_length() - 8
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 1, 12
        route = v.addr.GlobalRoute(dgid=v.addr.GID(theirs.gid), sgid_index=gid.index, hop_limit=64)
        attributes.ah_attr = v.addr.AHAttr(gr=route, is_global=1, port_num=PORT)
        try:
            pair.to_rtr(attributes)
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = TIMEOUT, RETRIES, 7
            attributes.max_rd_atomic, attributes.sq_psn = 1, mine.sequence
            pair.to_rts(attributes)
        except v.pyverbs_error.PyverbsError as error:
            raise TransportError(
                f"fabric: {device.name} cannot be connected with {theirs.device} of rank "
                f"{mine.peer} ({theirs.gid}): {error}"
            ) from error
        return native.End(pointer, theirs.address, region.lkey, theirs.key, INLINE)

    def break_pair(self, at: int) -> None:
        """Puts a queue pair into the error state: all its writes fail, under way or to come."""
        v = self._verbs
        self._pairs[at][1].modify(v.qp.QPAttr(qp_state=v.enums.IBV_QPS_ERR), v.enums.IBV_QP_STATE)

    def close(self) -> None:
        for _, pair, queue, _ in self._pairs:
            pair.close()
            queue.close()
        for context in {id(port[2]): port[2] for port in self._ports}.values():
            context.close()


def locked_limit() -> int | None:
    """Bytes of memory that this process may lock; None is without a limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft
