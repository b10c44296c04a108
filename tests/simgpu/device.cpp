// device.cpp: a device for torch that has no hardware, whose memory is the host's, which nobody but its own kernels may
// touch. With it the engine's paths for GPUs run where there is none (plugin.py). It is torch's device type "mtia", of
// which torch itself has a name, a dispatch key and hooks: modules move to it in place, as they do to CUDA.
//
// It is as late as a GPU may be: a copy with non_blocking=True between a device and locked host memory stays in its
// stream until something waits for the stream or one of its events, or another operation of that stream comes. So a
// missing wait is seen: storage that has not been filled, or that has been given back, is full of NaN, and so is memory
// that a late copy reads after the host has overwritten it. A late copy keeps no memory alive, as a GPU's does not. It
// is waited for, as torch's allocators do, where its memory is torch's own locked one, or a device's of the same stream
// or of one that record_stream has named. Else it reads NaN of what has gone; what it writes to, and memory of the host
// that is unlocked, is a race that `races` tells.
//
// All arithmetic is the CPU's: operators without a kernel here run on copies (at::native::cpu_fallback).
#include <torch/csrc/utils/pybind.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/MTIAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace {

constexpr auto kDevice = c10::DeviceType::MTIA;
std::recursive_mutex lock;
using Held = std::lock_guard<std::recursive_mutex>;

// ---- streams
// ---------------------------------------------------------------------------------------------------------
struct Span {
  uintptr_t begin, end;
  bool meets(const Span &other) const { return begin < other.end && other.begin < end; }
};
struct Late {
  std::function<void()> copy;
  Span device, host;
  bool to_device;
};
struct Queue {
  std::deque<Late> waiting;
  int64_t begun = 0, told = 0; // operations that have run; that were told to run
};
std::map<int64_t, Queue> queues;
thread_local int64_t current = 0;
std::vector<std::string> races;

void reach(int64_t stream, int64_t mark) {
  const Held held(lock);
  Queue &q = queues[stream];
  const at::NoGradGuard no_grad;
  while (q.begun < mark && !q.waiting.empty()) {
    const auto next = std::move(q.waiting.front());
    q.waiting.pop_front(), q.begun++;
    next.copy();
  }
}
int64_t mark(int64_t stream) {
  const Held held(lock);
  return queues[stream].told;
}
void drain(int64_t stream) { reach(stream, mark(stream)); }
// The streams with copies for which use(copy).
template <class F> std::vector<int64_t> streams_of(F use) {
  std::vector<int64_t> found;
  for (const auto &[stream, queue] : queues)
    if (std::any_of(queue.waiting.begin(), queue.waiting.end(), use)) found.push_back(stream);
  return found;
}
void race(const char *memory, int64_t stream) {
  races.push_back(std::string(memory) + " went while a copy in stream " + std::to_string(stream) + " used it");
}

// ---- memory
// ----------------------------------------------------------------------------------------------------------
struct Block {
  size_t size;
  std::set<int64_t> streams; // it was made in, and record_stream has named: torch's allocator waits for these
};
std::map<void *, Block> blocks;
size_t allocated = 0, most = 0;
std::map<uintptr_t, size_t> locked; // of the host
Span span(const void *p, size_t n) { return {(uintptr_t)p, (uintptr_t)p + n}; }

void give_back(void *p) {
  if (!p) return;
  const Held held(lock);
  const auto at = blocks.find(p);
  const Block &b = at->second;
  const Span mine = span(p, b.size);
  const auto uses = [&mine](const Late &late) { return late.device.meets(mine); };
  for (const int64_t stream : b.streams)
    if (const auto &waiting = queues[stream].waiting; std::any_of(waiting.begin(), waiting.end(), uses)) drain(stream);
  for (const int64_t stream : streams_of([&uses](const Late &late) { return uses(late) && late.to_device; }))
    race("memory of the device", stream);
  memset(p, 0xff, b.size);
  for (const int64_t stream : streams_of(uses)) drain(stream);
  allocated -= b.size;
  blocks.erase(at);
  free(p);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void *p = n ? aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    if (p) {
      const Held held(lock);
      memset(p, 0xff, n);
      blocks[p] = {n, {current}}, allocated += n, most = std::max(most, allocated);
    }
    return {p, p, &give_back, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void *to, const void *from, size_t n) const override { memcpy(to, from, n); }
};
Memory memory;
REGISTER_ALLOCATOR(kDevice, &memory)

// torch's own locked memory (pin_memory=True), full of NaN until it is written, and again when it is given back.
void give_back_locked(void *p) {
  if (!p) return;
  const Held held(lock);
  const Span mine = span(p, locked[(uintptr_t)p]);
  for (const int64_t stream : streams_of([&mine](const Late &late) { return late.host.meets(mine); })) drain(stream);
  memset(p, 0xff, locked[(uintptr_t)p]);
  locked.erase((uintptr_t)p);
  free(p);
}
struct LockedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void *p = n ? aligned_alloc(4096, (n + 4095) / 4096 * 4096) : nullptr;
    if (p) {
      const Held held(lock);
      memset(p, 0xff, n);
      locked[(uintptr_t)p] = n;
    }
    return {p, p, &give_back_locked, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back_locked; }
  void copy_data(void *to, const void *from, size_t n) const override { memcpy(to, from, n); }
};
LockedMemory locked_memory;

void unlock(uintptr_t p) {
  const Held held(lock);
  const Span mine = {p, p + locked[p]};
  for (const int64_t stream : streams_of([&mine](const Late &late) { return late.host.meets(mine); }))
    race("locked memory of the host", stream), drain(stream);
  locked.erase(p);
}

bool is_locked(const void *p) {
  const Held held(lock);
  auto at = locked.upper_bound((uintptr_t)p);
  return at != locked.begin() && (uintptr_t)p < (--at)->first + at->second;
}

} // namespace
namespace at {
struct MTIAHooks final : at::MTIAHooksInterface {
  explicit MTIAHooks(at::MTIAHooksArgs = {}) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getDeviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool hasMTIA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void *p) const override { return is_locked(p); }
  c10::Allocator *getPinnedMemoryAllocator() const override { return &locked_memory; }
};
REGISTER_MTIA_HOOKS(MTIAHooks)
} // namespace at
namespace {

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kDevice, 0); }
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, 0));
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  // Those of autograd, between operations that run in order anyway.
  void record(void **, const c10::Stream &, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void *, const c10::Stream &) const override {}
  bool queryEvent(void *) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(MTIA, Guard)

// ---- kernels
// --------------------------------------------------------------------------------------------------------- The same
// memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor &t) {
  if (t.is_cpu()) return t.detach();
  const size_t need = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
  TORCH_CHECK(t.numel() == 0 || need <= t.storage().nbytes(), "a copy uses ", need, " bytes of a storage that has ",
              t.storage().nbytes(), ": it came too late, or too early");
  return at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}

// The same without its storage: what an operation that is under way knows of a tensor.
at::Tensor bare(const at::Tensor &t) {
  return at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}
Span span_of(const at::Tensor &t) {
  return span(t.data_ptr(), at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()));
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
  const at::Tensor host = from.is_cpu() ? from : to.is_cpu() ? to : at::Tensor();
  const at::Tensor target = on_cpu(to), source = on_cpu(from); // and both are large enough
  if (non_blocking && host.defined() && host.numel() && is_locked(host.data_ptr())) {
    const Held held(lock);
    const auto copy = [target = bare(target), source = bare(source)] {
      const at::NoGradGuard no_grad;
      target.copy_(source);
    };
    queues[current].waiting.push_back({copy, span_of(from.is_cpu() ? to : from), span_of(host), from.is_cpu()});
    queues[current].told++;
  } else {
    drain(current);
    const at::NoGradGuard no_grad;
    target.copy_(source);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::MTIA),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::MTIA),
                                           c10::dtype_or_default(dtype));
}
const at::Tensor &resize(const at::Tensor &self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::TensorImpl *t = self.unsafeGetTensorImpl();
  t->set_sizes_contiguous(size);
  const size_t need = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  c10::StorageImpl *s = self.storage().unsafeGetStorageImpl();
  if (need <= s->nbytes()) return self;
  c10::DataPtr fresh = memory.allocate(need);
  if (s->nbytes()) memcpy(fresh.get(), s->data(), s->nbytes());
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(need);
  return self;
}
at::Tensor &set_storage(at::Tensor &self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  at::TensorImpl *t = self.unsafeGetTensorImpl();
  t->set_storage_keep_dtype(source);
  t->set_storage_offset(offset);
  if (stride.empty()) t->set_sizes_contiguous(size);
  else t->set_sizes_and_strides(size, stride);
  return self;
}
at::Tensor &set_whole(at::Tensor &self, at::Storage source) {
  const int64_t n = (int64_t)source.nbytes() / (int64_t)self.itemsize();
  return set_storage(self, source, 0, {n}, {1});
}
at::Scalar scalar_of(const at::Tensor &self) {
  drain(current);
  return on_cpu(self).item();
}
void record_stream(at::Tensor &self, c10::Stream stream) {
  const Held held(lock);
  const auto at = blocks.find(self.storage().mutable_data());
  if (at != blocks.end()) at->second.streams.insert(stream.id());
}

// Operators without a kernel here: the CPU's over the same memory. Those that resize what they write run on copies.
void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  drain(current);
  if (op.schema().overload_name().find("out") != std::string::npos) return at::native::cpu_fallback(op, stack);
  std::vector<std::pair<at::Tensor, at::Tensor>> known; // (ours, the CPU's)
  const auto taken = [&known](const at::Tensor &t) {
    if (!t.defined() || t.device().type() != kDevice) return t;
    known.emplace_back(t, on_cpu(t));
    return known.back().second;
  };
  const auto given = [&known](const at::Tensor &t) {
    for (const auto &[ours, theirs] : known)
      if (t.is_same(theirs)) return ours;
    return t.defined() && t.is_cpu() ? t.to(c10::Device(kDevice, 0)) : t;
  };
  const auto each = [](c10::IValue &v, const auto &change) {
    if (v.isTensor()) v = change(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor &t : v.toTensorVector()) list.push_back(change(t));
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> &t : v.toOptionalTensorVector())
        list.push_back(t ? std::optional<at::Tensor>(change(*t)) : t);
      v = list;
    } else if (v.isDevice()) v = c10::Device(at::kCPU);
  };
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); i++) each((*stack)[i], taken);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) each((*stack)[i], given);
}

TORCH_LIBRARY_IMPL(aten, MTIA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor &, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &scalar_of);
  m.impl("record_stream", &record_stream);
}
TORCH_LIBRARY_IMPL(_, MTIA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("kind") = (int)kDevice;
  m.def("is_locked", [](uintptr_t p) { return is_locked((void *)p); });
  m.def("reach", &reach, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("drain", &drain, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "drain_all",
      [] {
        const Held held(lock);
        for (const int64_t stream : streams_of([](const Late &) { return true; })) drain(stream);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("mark", &mark);
  m.def("current", [] { return current; });
  m.def("set_current", [](int64_t stream) { current = stream; });
  m.def("lock", [](uintptr_t p, size_t n) { locked[p] = n; });
  m.def("unlock", &unlock);
  m.def("races", [] { return std::exchange(races, {}); });
  m.def("allocated", [] { return allocated; });
  m.def("most", [] { return most; });
  m.def("reset_most", [] { most = allocated; });
}
