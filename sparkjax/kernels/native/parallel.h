// Numbered tasks on somebody else's thread pool, the caller taking part.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparkjax {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls f(i) once for every i in [0, tasks). Threads take the next number from a counter, and the
// caller returns when all are done. It never waits for a helper that has not started: such a
// helper finds no number left and touches nothing but the job record, which it co-owns.
template <typename Pool, typename F>
void parallel_for(Pool& pool, int64_t tasks, int64_t threads, const F& f) {
  int64_t helpers = (threads < tasks ? threads : tasks) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < tasks; ++i) f(i);
    return;
  }
  struct Job {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
    const F* f;
    int64_t tasks;
    void work() {
      int64_t finished = 0, i;
      while ((i = next.fetch_add(1, std::memory_order_relaxed)) < tasks) {
        (*f)(i);
        ++finished;
      }
      if (finished) done.fetch_add(finished, std::memory_order_release);
    }
  };
  auto job = std::make_shared<Job>();
  job->f = &f;
  job->tasks = tasks;
  for (int64_t i = 0; i < helpers; ++i) {
    pool.Schedule([job] { job->work(); });
  }
  job->work();
  for (int spins = 0; job->done.load(std::memory_order_acquire) < tasks; ++spins) {
    if (spins < 400) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

// A float buffer of the calling thread, at least `count` long, aligned to 64 bytes; each SLOT is
// another buffer. Kept for the thread's next call.
template <int SLOT>
float* scratch(int64_t count) {
  struct Buffer {
    float* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (buffer.size < count) {
    std::free(buffer.data);
    buffer.size = 0;
    const int64_t size = (count + 15) / 16 * 16;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
    if (!buffer.data) throw std::bad_alloc();
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace sparkjax
