// How a communicator is opened (comm/open.c, rendezvous.c, arena.c, segment.c): what is refused, what peers are told,
// what it costs. Also dc_comm_config's and dc_reducer_config's sizes.
#include "comm/bucket.h"
#include "ranks.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>

using namespace ranks;

namespace {
int late_ms = 0; // so long after it is asked for a write to a peer's memory begins
} // namespace

// In place of the C library's, for the library too.
extern "C" ssize_t process_vm_writev(pid_t pid, const iovec *from, unsigned long n, const iovec *to, unsigned long m,
                                     unsigned long flags) {
  if (late_ms) nap_ms(late_ms);
  return syscall(SYS_process_vm_writev, pid, from, n, to, m, flags);
}

namespace {

TEST(Sizes, OfAConfiguration) {
  const std::string address = fresh_address();
  dc_comm_config k = config_of(address.c_str(), 0, 1);
  dc_comm *c = nullptr;
  k.struct_size = 0;
  EXPECT_EQ(dc_comm_open(&k, &c), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "dc_comm_config.struct_size is 0: set it to sizeof(dc_comm_config)"))
      << dc_last_error();
  k.struct_size = sizeof k + 8;
  EXPECT_EQ(dc_comm_open(&k, &c), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "built for a newer one")) << dc_last_error();
  EXPECT_EQ(dc_comm_open(nullptr, &c), DC_E_INVALID);
  k.struct_size = sizeof k;
  ASSERT_EQ(dc_comm_open(&k, &c), DC_OK) << dc_last_error();
  dc_comm_close(c);

  dc_reducer_config r = {};
  dc_reducer *out = nullptr;
  EXPECT_EQ(dc_reducer_create(&r, &out), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "dc_reducer_config.struct_size is 0")) << dc_last_error();
  r.struct_size = sizeof r + 1;
  EXPECT_EQ(dc_reducer_create(&r, &out), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "built for a newer one")) << dc_last_error();
}

// What was compiled when the struct ended with `flags`. It lies in a block of just that size, which AddressSanitizer
// watches.
TEST(Sizes, AnOlderCallerIsTaken) {
  const std::string address = fresh_address();
  dc_comm_config k = config_of(address.c_str(), 0, 1);
  k.struct_size = offsetof(dc_comm_config, flags) + sizeof k.flags;
  std::vector<char> old((const char *)&k, (const char *)&k + k.struct_size);
  dc_comm *c = nullptr;
  ASSERT_EQ(dc_comm_open((const dc_comm_config *)old.data(), &c), DC_OK) << dc_last_error();
  dc_comm_close(c);
}

// ---- what peers are told
// ---------------------------------------------------------------------------------------------
void set_env(const char *name, const char *value) { setenv(name, value, 1); }

TEST(Opening, AFailureOfOneRankIsToldToAll) {
  for (int bad : {0, 1}) {
    const std::string address = fresh_address();
    auto out = run_ranks(3, [&](int rank) -> std::string {
      if (rank == bad) set_env("DEEPC_CMA", "yes");
      dc_comm_config k = config_of(address.c_str(), rank, 3, 2, 4096, 20000);
      dc_comm *c = nullptr;
      const double begun = now();
      WANT_STATUS(DC_E_ENV, dc_comm_open(&k, &c));
      WANT(now() - begun < 15, "it took the time-out");
      WANT_TEXT("DEEPC_CMA");
      WANT_TEXT(fmt("rank %d could not open it", bad).c_str());
      return "";
    });
    expect_all_fine(out);
  }
}

// What lies below the caller's frame, where that of dc_comm_open was, stays as it is for so long.
__attribute__((noinline)) bool stack_stays(int ms) {
  volatile unsigned char below[96 << 10];
  for (auto &b : below) b = 0xab;
  nap_ms(ms);
  for (auto &b : below)
    if (b != 0xab) return false;
  return true;
}

// A peer that is stopped while it tries whether it may write here, and goes on when we have given up.
TEST(Opening, NobodyWritesToTheStackOfOneThatHasGivenUp) {
  const std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    late_ms = rank ? 1800 : 0;
    dc_comm_config k = config_of(address.c_str(), rank, 2, 2, 4096, 1000);
    dc_comm *c = nullptr;
    const int rc = dc_comm_open(&k, &c);
    WANT(rank || (rc != DC_OK && stack_stays(1600)), "%s", rc ? "somebody wrote to it" : "it did not give up");
    dc_comm_close(c); // rank 1 has seen that rank 0 was there
    return "";
  }));
}

int open_descriptors() {
  int n = 0;
  for (int fd = 0; fd < 4096; fd++) n += fcntl(fd, F_GETFD) >= 0;
  return n;
}

TEST(Opening, OutOfDescriptorsIsSaidAtOnce) {
  const std::string address = fresh_address();
  auto out = run_ranks(4, [&](int rank) -> std::string {
    // the others have nobody to hear it from: rank 0 does not listen yet
    dc_comm_config k = config_of(address.c_str(), rank, 4, 2, 4096, rank ? 2000 : 20000);
    dc_comm *c = nullptr;
    const double begun = now();
    if (rank == 0) {
      const rlim_t few = (rlim_t)open_descriptors() + 2; // our pidfd and the listener
      rlimit lim = {few, few};
      setrlimit(RLIMIT_NOFILE, &lim);
      WANT_STATUS(DC_E_SYSTEM, dc_comm_open(&k, &c));
      WANT_TEXT("ulimit -n");
    } else {
      WANT(dc_comm_open(&k, &c) != DC_OK);
    }
    WANT(rank != 0 || now() - begun < 15, "it took the time-out");
    return "";
  });
  EXPECT_EQ(out[0].text, "");
}

// A rank that is killed between telling the others of itself and joining; who waits knows its process only. The
// time-out is long: without the look the test would end in it.
TEST(Opening, ADeathBeforeJoiningIsToldToAll) {
  for (int victim : {0, 2}) {
    const std::string address = fresh_address();
    int known[2];
    ASSERT_EQ(pipe(known), 0);
    const pid_t late = fork(); // stands for rank `victim`, which never joins
    if (late == 0) {
      char all;
      for (int i = 0; i < 2; i++) (void)!read(known[0], &all, 1);
      usleep(300000); // most likely the others are waiting by then; if not, they find it dead
      _exit(0);
    }
    auto out = run_ranks(3, [&](int rank) -> std::string {
      if (rank == victim) return "";
      int32_t pid[3] = {0, 0, 0};
      pid[victim] = late;
      dc_comm_config k = config_of(address.c_str(), rank, 3, 2, 4096, 300000);
      k.pid = pid;
      dc_comm *c = nullptr;
      WANT(write(known[1], "x", 1) == 1, "pipe");
      WANT_STATUS(DC_E_PEER_DIED, dc_comm_open(&k, &c));
      WANT_TEXT(fmt("rank %d (pid %d) died before it joined", victim, (int)late).c_str());
      return "";
    });
    expect_all_fine(out);
    waitpid(late, nullptr, 0);
    for (int fd : known) close(fd);
  }
}

// A process that is known and alive is waited for, and its place in the group costs no descriptor afterwards.
TEST(Opening, ALateRankIsWaitedFor) {
  const std::string address = fresh_address();
  const pid_t here = getpid();
  auto out = run_ranks(3, [&](int rank) -> std::string {
    int32_t pid[3] = {here, here, here}; // alive as long as the test
    dc_comm_config k = config_of(address.c_str(), rank, 3, 2, 4096, 60000);
    k.pid = pid;
    if (rank != 1) usleep(rank == 0 ? 250000 : 500000);
    const int before = open_descriptors();
    dc_comm *c = nullptr;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    WANT(open_descriptors() - before == 3 + 1, "%d descriptors", open_descriptors() - before);
    FINE(dc_comm_close(c));
    return "";
  });
  expect_all_fine(out);
}

// ---- descriptors
// -----------------------------------------------------------------------------------------------------
TEST(Descriptors, OnePerPeerHoweverManyGroups) {
  std::vector<std::string> address;
  for (int i = 0; i < 8; i++) address.push_back(fresh_address());
  auto out = run_ranks(4, [&](int rank) -> std::string {
    const int before = open_descriptors();
    std::vector<dc_comm *> all;
    for (auto &a : address) {
      dc_comm_config k = config_of(a.c_str(), rank, 4);
      dc_comm *c = nullptr;
      FINE(dc_comm_open(&k, &c));
      all.push_back(c);
    }
    WANT(open_descriptors() - before == 4 + 1, "%d descriptors", open_descriptors() - before); // and the flight record
    dc_segment *s = nullptr;
    void *base = nullptr;
    FINE(dc_segment_create(all[0], 1 << 20, &s, &base));
    WANT(open_descriptors() - before == 4 + 1, "a segment keeps a descriptor");
    for (size_t i = 1; i < all.size(); i++) FINE(dc_comm_close(all[i]));
    FINE(dc_barrier(all[0], 0));
    dc_segment_free(s);
    FINE(dc_comm_close(all[0]));
    WANT(open_descriptors() - before <= 1, "%d descriptors are left", open_descriptors() - before);
    return "";
  });
  expect_all_fine(out);
}

// The pidfds are shared, so closing one group must leave the others able to see a death.
TEST(Descriptors, ADeathIsSeenAfterAnotherGroupIsClosed) {
  const std::string one = fresh_address(), two = fresh_address();
  auto out = run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(one.c_str(), rank, 3), k2 = config_of(two.c_str(), rank, 3);
    dc_comm *c = nullptr, *c2 = nullptr;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_comm_open(&k2, &c2));
    FINE(dc_barrier(c2, 0));
    FINE(dc_comm_close(c2));
    if (rank == 1) kill(getpid(), SIGKILL);
    WANT_STATUS(DC_E_PEER_DIED, dc_barrier(c, 0));
    WANT_TEXT("killed by signal 9");
    dc_comm_close(c);
    return "";
  });
  EXPECT_EQ(out[0].text, "");
  EXPECT_EQ(out[2].text, "");
  EXPECT_TRUE(out[1].killed());
}

// ---- strangers
// -------------------------------------------------------------------------------------------------------
const uint8_t secret[DC_COMM_SECRET] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

int knock(const std::string &address) {
  sockaddr_un a = {};
  a.sun_family = AF_UNIX;
  memcpy(a.sun_path + 1, address.data(), address.size());
  int s = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  for (int i = 0; i < 1000; i++) {
    if (connect(s, (sockaddr *)&a, (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + address.size())) == 0) return s;
    nap_ms(10);
  }
  close(s);
  return -1;
}

// Rank 2 of this test is a process of the same user that has read the address, but does not know the secret: it is not
// let in as rank 1, and neither it nor one that talks nonsense ends the joining.
TEST(Strangers, AreDroppedWithoutAWord) {
  const std::string address = fresh_address();
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  auto out = run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank == 2 ? 1 : rank, 2, 2, 4096, 20000);
    dc_comm *c = nullptr;
    char go = 1;
    if (rank == 2) {
      int s = knock(address);
      WANT(s >= 0);
      send(s, "let me in", 9, 0);
      dc_comm_config wrong = k;
      const uint8_t guess[DC_COMM_SECRET] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17};
      for (const uint8_t *g : {(const uint8_t *)nullptr, guess}) {
        wrong.secret = g;
        WANT(dc_comm_open(&wrong, &c) == DC_E_PEER_DIED, "a stranger was let in, or told: %s", dc_last_error());
        WANT_TEXT("closed the connection");
      }
      close(s);
      WANT(write(gate[1], &go, 1) == 1);
      return "";
    }
    k.secret = secret;
    if (rank == 1) WANT(read(gate[0], &go, 1) == 1); // the strangers come first
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    return "";
  });
  close(gate[0]);
  close(gate[1]);
  expect_all_fine(out);
}

// ---- segments
// -------------------------------------------------------------------------------------------------------- Every one of
// 150 segments is registered, as long as 64 are not exceeded; then it is said.
TEST(Segments, PlacesAreUsedAgain) {
  const std::string address = fresh_address();
  auto out = run_ranks(2, [&](int rank) -> std::string {
    const int64_t n = 1 << 18;
    dc_comm_config k = config_of(address.c_str(), rank, 2, 2, 1 << 16);
    dc_comm *c = nullptr;
    FINE(dc_comm_open(&k, &c));
    std::vector<dc_segment *> kept;
    for (int i = 0; i < 150; i++) {
      dc_segment *s = nullptr;
      void *base = nullptr;
      FINE(dc_segment_create(c, n * 4, &s, &base));
      dc_counter_reset();
      FINE(dc_broadcast(c, base, n, DC_F32, 0, 0));
      WANT(rank == 0 || dc_counter_get(DC_COUNTER_coll_bytes_out) == 0, "segment %d is staged", i);
      WANT(dc_counter_get(DC_COUNTER_coll_bytes_single_copy) == 0, "segment %d is not mapped", i);
      if (i % 15 == rank) kept.push_back(s); // the ranks free different ones
      else dc_segment_free(s);
    }
    for (auto s : kept) dc_segment_free(s);
    kept.clear();
    FINE(dc_barrier(c, 0));
    dc_segment *s = nullptr;
    void *base = nullptr;
    for (int i = 0; i < 64; i++) {
      FINE(dc_segment_create(c, 1, &s, &base));
      kept.push_back(s);
    }
    WANT_STATUS(DC_E_STATE, dc_segment_create(c, 1, &s, &base));
    WANT_TEXT("64 segments already");
    FINE(dc_barrier(c, 0)); // sound
    if (rank == 1) dc_segment_free(kept[7]);
    WANT_STATUS(DC_E_STATE, dc_segment_create(c, 1, &s, &base));
    if (rank == 0) dc_segment_free(kept[7]);
    FINE(dc_segment_create(c, 1, &s, &base));
    kept[7] = s;
    for (auto x : kept) dc_segment_free(x);
    dc_comm_close(c);
    return "";
  });
  expect_all_fine(out);
}

// ---- what the kernel allows
// ------------------------------------------------------------------------------------------ From here on `call` fails
// with EPERM in this process, as under a container's seccomp profile; only with the first argument `only`, where that
// is not negative.
void forbid(int call, long only = -1) {
  sock_filter f[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)only, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  if (only < 0) f[3] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 0);
  sock_fprog p = {sizeof f / sizeof *f, f};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p)) abort();
}

TEST(Kernel, EitherCopyForbiddenIsStaging) {
  for (int call : {SYS_process_vm_readv, SYS_process_vm_writev}) {
    const std::string address = fresh_address();
    auto out = run_ranks(2, [&](int rank) -> std::string {
      forbid(call);
      dc_comm_config k = config_of(address.c_str(), rank, 2, 2, 1 << 16);
      dc_comm *c = nullptr;
      FINE(dc_comm_open(&k, &c));
      std::vector<float> x(1 << 20, 1.0f);
      for (int i = 0; i < 20; i++) {
        std::fill(x.begin(), x.end(), 1.0f);
        FINE(dc_all_reduce(c, x.data(), x.data(), (int64_t)x.size(), DC_F32, DC_RED_SUM, 0));
        for (float v : x) WANT(v == 2.0f);
      }
      FINE(dc_comm_close(c));
      return "";
    });
    expect_all_fine(out);
  }
}

// What Yama would be asked for. SIGSYS stands in for the prctl, which does nothing on kernels without Yama.
volatile long traced[8];
volatile int traces;
void on_sys(int, siginfo_t *, void *context) {
  auto *u = (ucontext_t *)context;
#if defined(__x86_64__)
  if (traces < 8) traced[traces] = (long)u->uc_mcontext.gregs[REG_RSI];
  u->uc_mcontext.gregs[REG_RAX] = 0;
#elif defined(__aarch64__)
  if (traces < 8) traced[traces] = (long)u->uc_mcontext.regs[1];
  u->uc_mcontext.regs[0] = 0;
#endif
  traces = traces + 1;
}

void trap_tracer() {
  struct sigaction a = {};
  a.sa_sigaction = on_sys;
  a.sa_flags = SA_SIGINFO;
  sigaction(SIGSYS, &a, nullptr);
  sock_filter f[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PR_SET_PTRACER, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog p = {sizeof f / sizeof *f, f};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &p)) abort();
}

TEST(Kernel, WhereCopiesAreDeniedTheCommonParentBecomesTracer) {
  enum { FREE, DENIED, STRANGERS };
  for (int how : {FREE, DENIED, STRANGERS}) {
    const std::string address = fresh_address();
    const long parent = getpid();
    auto out = run_ranks(2, [&](int rank) -> std::string {
      if (how == STRANGERS && rank == 1) set_env("DEEPC_TRACER_PID", "4711"); // not the other one's
      trap_tracer();
      if (how != FREE) forbid(SYS_process_vm_readv);
      dc_comm_config k = config_of(address.c_str(), rank, 2);
      dc_comm *c = nullptr;
      FINE(dc_comm_open(&k, &c));
      FINE(dc_barrier(c, 0));
      FINE(dc_comm_close(c));
      if (how == DENIED) WANT(traces == 2 && traced[0] == parent && traced[1] == 0, "%d calls, %ld", traces, traced[0]);
      else WANT(traces == 0, "%d calls", traces); // nobody is admitted without need
      return "";
    });
    expect_all_fine(out);
  }
}

} // namespace
