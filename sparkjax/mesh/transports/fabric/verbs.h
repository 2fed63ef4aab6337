// The network as RDMA writes on reliable queue pairs.
//
// pyverbs makes the queue pairs and connects them; it has no word for the pointer that ibv_post_send
// takes. So this library, loaded in front of pyverbs, stands in front of libibverbs' ibv_create_qp
// and remembers what it gave. Posting and polling are inline functions of the header: nothing of
// libibverbs is linked.

#pragma once

#include <infiniband/verbs.h>

#include <cstring>
#include <dlfcn.h>
#include <vector>

#include "network.h"

namespace sparkjax {

inline thread_local ibv_qp* last_created = nullptr;

// One end of a link: its queue pair, and where the picture lies at both ends.
struct End {
  uint64_t queue_pair;  // ibv_qp*
  uint64_t remote;      // address of the other picture
  uint32_t local_key, remote_key;
  uint32_t inline_bytes;
};

inline const char* words_of(int status) {
  switch (status) {
    case IBV_WC_LOC_PROT_ERR: return "local protection error (memory is not registered)";
    case IBV_WC_WR_FLUSH_ERR: return "the queue pair was closed or is in error";
    case IBV_WC_REM_INV_REQ_ERR: return "remote invalid request (access flags)";
    case IBV_WC_REM_ACCESS_ERR: return "remote access error (key or address)";
    case IBV_WC_REM_OP_ERR: return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR: return "no answer (retries exceeded)";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "the other end is not ready (retries exceeded)";
    default: return "completion error";
  }
}

class Verbs : public Network {
 public:
  Verbs(const char* base, std::vector<End> ends) : base_(base), ends_(std::move(ends)) {
    for (size_t l = 0; l < ends_.size(); ++l) {
      ibv_cq* queue = pair(l)->send_cq;
      bool known = false;
      for (ibv_cq* other : queues_) known = known || other == queue;
      if (!known) queues_.push_back(queue);
    }
  }

  std::string write(int link, const Write& write) override {
    const End& end = ends_[link];
    ibv_sge piece{};
    piece.addr = reinterpret_cast<uint64_t>(base_) + write.from;
    piece.length = write.bytes, piece.lkey = end.local_key;
    ibv_send_wr request{}, *bad = nullptr;
    request.wr_id = static_cast<uint64_t>(link) << 48 | write.number;
    request.sg_list = &piece, request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = (write.signal ? IBV_SEND_SIGNALED : 0) |
                         (write.bytes <= end.inline_bytes ? IBV_SEND_INLINE : 0);
    request.wr.rdma.remote_addr = end.remote + write.to;
    request.wr.rdma.rkey = end.remote_key;
    const int error = ibv_post_send(pair(link), &request, &bad);
    return error ? std::string("ibv_post_send: ") + std::strerror(error) : "";
  }

  int poll(Done* done, int room) override {
    int count = 0;
    for (ibv_cq* queue : queues_) {
      ibv_wc got[8];
      const int n = count + 8 <= room ? ibv_poll_cq(queue, 8, got) : 0;
      for (int i = 0; i < n; ++i) {
        const bool good = got[i].status == IBV_WC_SUCCESS;
        done[count++] = {static_cast<int>(got[i].wr_id >> 48), got[i].wr_id & ((1ull << 48) - 1),
                         good ? nullptr : words_of(got[i].status)};
      }
    }
    return count;
  }

 private:
  ibv_qp* pair(size_t l) const { return reinterpret_cast<ibv_qp*>(ends_[l].queue_pair); }

  const char* base_;
  std::vector<End> ends_;
  std::vector<ibv_cq*> queues_;
};

}  // namespace sparkjax

// In front of libibverbs'; the true one is called.
#undef ibv_create_qp
extern "C" ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  using Create = ibv_qp* (*)(ibv_pd*, ibv_qp_init_attr*);
  static void* const library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  static const auto create =
      library ? reinterpret_cast<Create>(dlsym(library, "ibv_create_qp")) : nullptr;
  sparkjax::last_created = create ? create(domain, attributes) : nullptr;
  return sparkjax::last_created;
}

// The queue pair that this thread made last, if it has this number; or 0.
extern "C" uint64_t sparkjax_fabric_queue_pair(uint32_t number) {
  ibv_qp* made = sparkjax::last_created;
  return made && made->qp_num == number ? reinterpret_cast<uint64_t>(made) : 0;
}
