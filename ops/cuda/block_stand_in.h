// block_stand_in.h: the threads of a CUDA block for a plain C++ compiler (tests only): warp.cuh's names. Each thread
// runs on a stack of its own, in turn with the others, until it waits for its warp or block. Their order is the
// caller's choice: a body that lacks a barrier gives other results in another order. What threads do together is
// carried out by the last of them to come, for all, elements lying in registers as the PTX ISA says.
#ifndef DEEPC_CUDA_BLOCK_STAND_IN_H
#define DEEPC_CUDA_BLOCK_STAND_IN_H

#include <functional>
#include <memory>
#include <stdexcept>
#include <ucontext.h>
#include <vector>

#include "cuda/host_stand_in.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace dc_gpu {

class Block {
public:
  enum Order { kForwards, kBackwards };
  // Calls body() as each of `count` threads, a multiple of 32. std::runtime_error: some wait for what never comes, or
  // lanes of a warp for different things.
  void run(int count, Order order, const std::function<void()> &body) {
    threads_.resize((size_t)count);
    for (auto &t : threads_) {
      if (!t.stack) t.stack.reset(new char[kStack]);
      t.done = false, t.waits_for = nullptr, t.copies.clear();
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.get(), t.context.uc_stack.ss_size = kStack, t.context.uc_link = nullptr;
      makecontext(&t.context, enter, 0);
    }
    body_ = &body, wrong_ = nullptr, all_ = Group{count}, warps_.assign((size_t)count / 32, Group{32});
    current() = this;
    for (int left = count, moved = 1; left > 0 && moved && !wrong_;) {
      moved = 0;
      for (int k = 0; k < count; k++) {
        Thread &t = threads_[(size_t)(number_ = order == kForwards ? k : count - 1 - k)];
        if (t.done || (t.waits_for && t.waits_for->turn == t.turn)) continue;
        switch_to(t), moved = 1, left -= t.done;
      }
      if (!moved) wrong_ = "threads wait for others that never come";
    }
    current() = nullptr;
    if (wrong_) throw std::runtime_error(wrong_);
  }
  static Block *&current() {
    static Block *block = nullptr;
    return block;
  }
  int number() const { return number_; }

  // Waits for all threads, or those of the warp; the last to come calls act().
  template <class F> void together(bool warp, int what, F act) {
    Group &g = warp ? warps_[(size_t)number_ / 32] : all_;
    if (g.arrived == 0) g.what = what;
    if (g.what != what) wrong_ = "lanes of a warp wait for different things";
    if (++g.arrived == g.size) {
      act(), g.arrived = 0, g.turn++;
      return;
    }
    Thread &t = threads_[(size_t)number_];
    t.waits_for = &g, t.turn = g.turn;
    leave(t);
  }
  // What lane `lane` of the calling thread's warp has posted.
  struct Posted {
    uint32_t in[6];
    float *c;
    uint32_t *out;
    const void *row;
    int lane;
  };
  struct Copy {
    void *to;
    const void *from; // NULL: zeros
  };
  std::vector<Copy> &copies() { return threads_[(size_t)number_].copies; } // that this thread has begun
  Posted &posted(int lane) { return threads_[(size_t)(number_ / 32 * 32 + lane)].posted; }

private:
  enum { kStack = 256 << 10 };
  struct Group {
    int size = 0, arrived = 0, what = 0;
    long turn = 0;
  };
  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done;
    Group *waits_for;
    long turn;
    void *fake = nullptr;
    Posted posted;
    std::vector<Copy> copies;
  };
  void switch_to(Thread &t) {
#if defined(__SANITIZE_ADDRESS__)
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, t.stack.get(), kStack);
#endif
    swapcontext(&main_, &t.context);
    t.context.uc_stack = {}; // AddressSanitizer forgets all of a stack that it is told of: once, when a thread begins
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }
  void leave(Thread &t) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(t.done ? nullptr : &t.fake, main_stack_, main_size_);
#endif
    swapcontext(&t.context, &main_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(t.fake, &main_stack_, &main_size_);
#endif
  }
  static void enter() {
    Block &b = *current();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &b.main_stack_, &b.main_size_);
#endif
    (*b.body_)();
    Thread &t = b.threads_[(size_t)b.number_];
    t.done = true;
    b.leave(t);
  }

  std::vector<Thread> threads_;
  std::vector<Group> warps_;
  Group all_;
  const std::function<void()> *body_ = nullptr;
  const char *wrong_ = nullptr;
  int number_ = 0;
  ucontext_t main_;
  const void *main_stack_ = nullptr;
  size_t main_size_ = 0;
};

inline int block_thread(void) { return Block::current()->number(); }
inline void block_sync(void) {
  Block::current()->together(false, 0, [] {});
}
inline void warp_sync(void) {
  Block::current()->together(true, 1, [] {});
}
inline uint32_t from_lane(uint32_t v, int lane) {
  Block &b = *Block::current();
  Block::Posted &mine = b.posted(b.number() % 32);
  uint32_t got = 0;
  mine.in[0] = v, mine.lane = lane, mine.out = &got;
  b.together(true, 2, [&b] {
    for (int l = 0; l < 32; l++) *b.posted(l).out = b.posted(b.posted(l).lane).in[0];
  });
  return got;
}
// What every lane gets: of the lanes' values in order, one(so far, value, lane).
template <class F> uint32_t fold_warp(int what, uint32_t v, F one) {
  Block &b = *Block::current();
  Block::Posted &mine = b.posted(b.number() % 32);
  uint32_t got = 0;
  mine.in[0] = v, mine.out = &got;
  b.together(true, what, [&b, one] {
    uint32_t all = 0;
    for (int l = 0; l < 32; l++) all = one(all, b.posted(l).in[0], l);
    for (int l = 0; l < 32; l++) *b.posted(l).out = all;
  });
  return got;
}
inline uint32_t ballot(bool yes) {
  return fold_warp(6, yes, [](uint32_t all, uint32_t bit, int lane) { return all | bit << lane; });
}
inline int bits_of(uint32_t mask) { return __builtin_popcount(mask); }
inline uint32_t most_of_warp(uint32_t v) {
  return fold_warp(7, v, [](uint32_t most, uint32_t next, int) { return next > most ? next : most; });
}
// Bytes are there when the thread waits for them, and full of NaN before.
inline void copy_ahead16(void *to, const void *from, bool there) {
  misaligned_accesses += (uintptr_t)to % 16 != 0 || (there && (uintptr_t)from % 16 != 0);
  memset(to, 0xff, 16);
  Block::current()->copies().push_back({to, there ? from : nullptr});
}
inline void copies_wait(void) {
  auto &copies = Block::current()->copies();
  for (const Block::Copy &c : copies) {
    if (c.from) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
  }
  copies.clear();
}
inline double from_lane(double v, int lane) {
  uint32_t half[2];
  memcpy(half, &v, sizeof v);
  half[0] = from_lane(half[0], lane), half[1] = from_lane(half[1], lane);
  memcpy(&v, half, sizeof v);
  return v;
}
inline void raise_to(uint32_t *at, uint32_t v) { *at = v > *at ? v : *at; }
inline void add_to(double *at, double v) { *at += v; }
inline float from_lane(float v, int lane) { return __uint_as_float(from_lane(__float_as_uint(v), lane)); }

// Elements of the two halves of a register.
template <class T> float half_of(uint32_t pair, int k) { return T::up((uint16_t)(pair >> (16 * k))); }

template <class T> void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Block &b = *Block::current();
  Block::Posted &mine = b.posted(b.number() % 32);
  memcpy(mine.in, a, sizeof a);
  mine.in[4] = b0, mine.in[5] = b1, mine.c = c;
  b.together(true, 3, [&b] {
    float left[16][16], right[16][8];
    for (int l = 0; l < 32; l++)
      for (int k = 0; k < 2; k++) {
        const Block::Posted &p = b.posted(l);
        for (int r = 0; r < 4; r++) left[l / 4 + r % 2 * 8][l % 4 * 2 + k + r / 2 * 8] = half_of<T>(p.in[r], k);
        for (int r = 0; r < 2; r++) right[l % 4 * 2 + k + r * 8][l / 4] = half_of<T>(p.in[4 + r], k);
      }
    for (int l = 0; l < 32; l++)
      for (int r = 0; r < 4; r++) {
        const int row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
        double sum = b.posted(l).c[r];
        for (int k = 0; k < 16; k++) sum += (double)left[row][k] * (double)right[k][column];
        b.posted(l).c[r] = (float)sum;
      }
  });
}

template <bool TURNED> void load_matrices(uint32_t (&m)[4], const void *row) {
  Block &b = *Block::current();
  Block::Posted &mine = b.posted(b.number() % 32);
  misaligned_accesses += (uintptr_t)row % 16 != 0;
  mine.row = row, mine.out = m;
  b.together(true, TURNED ? 4 : 5, [&b] {
    uint16_t x[4][8][8];
    for (int l = 0; l < 32; l++) memcpy(x[l / 8][l % 8], b.posted(l).row, 16);
    for (int l = 0; l < 32; l++)
      for (int k = 0; k < 4; k++) {
        const int g = l / 4, q = l % 4 * 2;
        b.posted(l).out[k] = TURNED ? (uint32_t)x[k][q][g] | (uint32_t)x[k][q + 1][g] << 16
                                    : (uint32_t)x[k][g][q] | (uint32_t)x[k][g][q + 1] << 16;
      }
  });
}

inline float exp2_fast(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float not_above_0(float y) { return y > 0.0f ? 0.0f : y; }
inline uint32_t high_half(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }

} // namespace dc_gpu
#endif
