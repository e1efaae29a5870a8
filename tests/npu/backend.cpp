// A device named "npu" in host memory: torch's PrivateUse1 key with a real allocator, guard and storage, and every operator
// computed by the CPU kernel on the same bytes. Copies to the host with non_blocking=True happen at synchronize(), as late
// as hardware may do them. "hccl" is gloo on the same bytes. For tests only.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

using at::Tensor;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
static thread_local c10::DeviceIndex current = 0;

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &c10::free_cpu, at::Device(NPU, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
static Allocator allocator;
REGISTER_ALLOCATOR(NPU, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return NPU; }
  at::Device exchangeDevice(at::Device d) const override {
    at::Device old(NPU, current);
    current = d.index();
    return old;
  }
  at::Device getDevice() const override { return {NPU, current}; }
  void setDevice(at::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(at::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(at::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(at::Device d, int = 0) const override {
    static int64_t made = 0;
    return c10::Stream(c10::Stream::UNSAFE, d, ++made);
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 4; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Late { Tensor from, to; at::Storage source; };
static std::vector<Late> pending;
static int64_t synchronized = 0;

static Tensor on_host(const Tensor& t) {
  if (!t.defined() || t.device().type() != NPU) return t;
  auto options = t.options().device(at::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, options);
}

static Tensor on_npu(const Tensor& t) {
  if (!t.defined() || t.device().type() != at::kCPU) return t;
  auto options = t.options().device(at::Device(NPU, current));
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::for_blob(t.data_ptr(), t.sizes()).strides(t.strides()).deleter([t](void*) {}).options(options)
      .target_device(at::Device(NPU, current)).make_tensor();
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 4; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return std::exchange(current, d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Device getDeviceFromPtr(void*) const override { return {NPU, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    for (auto& late : pending)
      TORCH_CHECK(!late.source.is_alias_of(storage), "npu: storage is resized while a copy to the host reads it");
    auto fresh = allocator.allocate(bytes);
    auto* impl = storage.unsafeGetStorageImpl();
    if (fresh.get() && storage.data()) memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
};
static bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

static Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (non_blocking && to.device().is_cpu() && from.numel()) {
    pending.push_back({on_host(from), to, from.storage()});
    return to;
  }
  on_host(to).copy_(on_host(from));
  return to;
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

static at::Tensor& set_storage(Tensor& t, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_meta__symint(t, s, offset, size, stride);
}

static const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  int64_t need = t.storage_offset();
  int64_t n = 1;
  for (auto s : sizes) n *= s;
  size_t bytes = (need + n) * t.itemsize();
  if (bytes > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  auto begin = stack->size() - count;
  std::vector<std::pair<Tensor, Tensor>> swapped;  // (host alias, original)
  auto host = [&](const Tensor& t) {
    if (!t.defined() || t.device().type() != NPU) return t;
    swapped.emplace_back(on_host(t), t);
    return swapped.back().first;
  };
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = host(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(host(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorList())
        list.push_back(t.has_value() ? std::optional<Tensor>(host(*t)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == NPU) value = at::Device(at::kCPU);
  }
  {
    c10::impl::ExcludeDispatchKeyGuard no_grad(c10::autograd_dispatch_keyset);
    op.callBoxed(stack);
  }
  for (auto& [alias, original] : swapped)  // an output that came empty, to be resized
    if (alias.defined() && !original.numel() && alias.numel()) copy_from_and_resize(alias, original);
  auto back = [&](const Tensor& t) {
    for (auto& [alias, original] : swapped)
      if (t.defined() && t.unsafeGetTensorImpl() == alias.unsafeGetTensorImpl()) return original;
    return on_npu(t);
  };
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = back(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(back(t));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
}

static std::vector<Tensor> on_host(std::vector<Tensor>& tensors) {
  std::vector<Tensor> out;
  for (auto& t : tensors) {
    TORCH_CHECK(t.device().type() == NPU, "hccl: a tensor of ", t.device());
    TORCH_CHECK(t.is_contiguous(), "hccl: a tensor that is not contiguous");
    out.push_back(on_host(t));
  }
  return out;
}

static std::vector<std::vector<Tensor>> on_host(std::vector<std::vector<Tensor>>& lists) {
  std::vector<std::vector<Tensor>> out;
  for (auto& list : lists) out.push_back(on_host(list));
  return out;
}

static bool equal(const std::vector<Tensor>& tensors) {
  for (auto& t : tensors)
    if (t.sizes() != tensors[0].sizes()) return false;
  return true;
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
struct Hccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> g) : Backend(g->getRank(), g->getSize()), gloo(std::move(g)) {}
  const std::string getBackendName() const override { return "hccl"; }
  WorkPtr broadcast(std::vector<Tensor>& t, const c10d::BroadcastOptions& o) override {
    auto h = on_host(t);
    return gloo->broadcast(h, o);
  }
  WorkPtr allreduce(std::vector<Tensor>& t, const c10d::AllreduceOptions& o) override {
    auto h = on_host(t);
    return gloo->allreduce(h, o);
  }
  WorkPtr reduce(std::vector<Tensor>& t, const c10d::ReduceOptions& o) override {
    auto h = on_host(t);
    return gloo->reduce(h, o);
  }
  WorkPtr allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in, const c10d::AllgatherOptions& o) override {
    auto a = on_host(out);
    auto b = on_host(in);
    if (equal(a[0])) return gloo->allgather(a, b, o);
    WorkPtr last;  // hccl takes unequal sizes, gloo does not
    for (int root = 0; root < size_; ++root) {
      std::vector<Tensor> part{a[0][root]};
      if (root == rank_) part[0].copy_(b[0]);
      c10d::BroadcastOptions options;
      options.rootRank = root;
      (last = gloo->broadcast(part, options))->wait();
    }
    return last;
  }
  WorkPtr reduce_scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& in,
                         const c10d::ReduceScatterOptions& o) override {
    auto a = on_host(out);
    auto b = on_host(in);
    if (equal(b[0])) return gloo->reduce_scatter(a, b, o);
    WorkPtr last;
    for (int root = 0; root < size_; ++root) {
      std::vector<Tensor> part{b[0][root].clone()};
      c10d::ReduceOptions options;
      options.reduceOp = o.reduceOp;
      options.rootRank = root;
      (last = gloo->reduce(part, options))->wait();
      if (root == rank_) a[0].copy_(part[0]);
    }
    return last;
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = on_host(out), b = on_host(in);
    return gloo->_allgather_base(a, b, o);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto a = on_host(out), b = on_host(in);
    return gloo->_reduce_scatter_base(a, b, o);
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                          const c10d::AllgatherOptions& o) override {
    auto a = on_host(out), b = on_host(in);
    return gloo->allgather_into_tensor_coalesced(a, b, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                          const c10d::ReduceScatterOptions& o) override {
    auto a = on_host(out), b = on_host(in);
    return gloo->reduce_scatter_tensor_coalesced(a, b, o);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                        const c10d::AllToAllOptions& o) override {
    auto a = on_host(out), b = on_host(in);
    return gloo->alltoall_base(a, b, to, from, o);
  }
  WorkPtr send(std::vector<Tensor>& t, int rank, int tag) override {
    auto h = on_host(t);
    return gloo->send(h, rank, tag);
  }
  WorkPtr recv(std::vector<Tensor>& t, int rank, int tag) override {
    auto h = on_host(t);
    return gloo->recv(h, rank, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return gloo->barrier(o); }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("on_host", [](const Tensor& t) { return on_host(t); });
  m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Hccl>(gloo);
  });
  m.def("set_device", [](int d) { current = d; });
  m.def("current_device", [] { return (int)current; });
  m.def("pending", [] { return (int64_t)pending.size(); });
  m.def("synchronize", [] {
    for (auto& late : pending) late.to.copy_(late.from);
    pending.clear();
    return ++synchronized;
  });
}
