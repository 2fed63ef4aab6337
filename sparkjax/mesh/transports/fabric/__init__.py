"""`fabric`: collectives between boxes over RDMA verbs.

topology.py   which rank is reached over which link; relays in a ring (pure)
verbs.py      pyverbs: devices, memory registration, queue pairs (imported when it is needed)
devices.py    which devices and GIDs carry the links (pure)
transport.py  `Fabric`: opens a world's links and makes the calls
measure.py    latency and bandwidth of every rail at boot, and what is slow about them
native.py     the C++ data plane: image.h, topology.h, sender.h, network.h (verbs.h, and
              rehearsal.h for tests), world.h; fabric.cc on a CPU, fabric.cu on a GPU
"""
