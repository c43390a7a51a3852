// A simulated accelerator for tests. Its memory is the host's, and each of its streams is a thread that does what it was
// given late and in order: copies, and every kernel that writes into tensors that are there already. A kernel that makes
// new tensors waits for its stream, because nobody else knows their shapes.
//
// It is stricter than a device: what is freed is overwritten, a copy must not reach over two pinned ranges, an error of
// pinning is remembered for the thread's next kernel, and memory ends where a test says.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr auto kSimulated = c10::DeviceType::PrivateUse1;

// ---- what tests set

std::atomic<int> first_delay_us{0};          // of each act of the first stream, on which training runs
std::atomic<int> other_delay_us{0};          // of each act of any other
std::atomic<int64_t> memory_limit{-1};       // bytes; -1 for none
std::atomic<int64_t> pin_limit{-1};          // bytes that the driver pins
thread_local int copies_until_failure = -1;  // copies of this thread to the host, from now; -1 for never
std::atomic<int> copies_until_exit{-1};      // likewise of all threads, until the process dies in one
std::atomic<bool> is_lost{false};            // every act is an error

std::atomic<int64_t> allocated_bytes{0};
std::atomic<int64_t> num_waits{0};  // of the host for a stream
thread_local bool has_error = false;

void check_device() {
  TORCH_CHECK(!is_lost, "simulated error: the device is lost");
  bool had_error = has_error;
  has_error = false;
  TORCH_CHECK(!had_error, "simulated error: an error from before that nobody took");
}

// ---- streams and events

class Stream {
 public:
  Stream() {
    std::thread([this] { work(); }).detach();
  }
  void put(std::function<void()> act) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      acts_.push_back(std::move(act));
      ++num_given_;
    }
    changed_.notify_all();
  }
  void wait() {
    ++num_waits;
    std::unique_lock<std::mutex> lock(mutex_);
    auto due = num_given_;
    changed_.wait(lock, [&] { return num_done_ >= due; });
  }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_done_ == num_given_;
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> act;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !acts_.empty(); });
        act = std::move(acts_.front());
        acts_.pop_front();
      }
      act();
      act = nullptr;  // it holds memory
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++num_done_;
      }
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> acts_;
  uint64_t num_given_ = 0, num_done_ = 0;
};

std::mutex streams_mutex;
std::vector<Stream*>& all_streams() {
  static std::vector<Stream*> streams{new Stream()};
  return streams;
}
Stream& find_stream(c10::StreamId id) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return *all_streams().at(id);
}
thread_local c10::StreamId current_id = 0;
Stream& current_stream() { return find_stream(current_id); }

void launch(std::function<void()> act) {
  auto id = current_id;
  current_stream().put([act = std::move(act), id] {
    auto delay_us = id == 0 ? first_delay_us.load() : other_delay_us.load();
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    act();
  });
}

struct Flag {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;
  std::chrono::steady_clock::time_point at;
  void set() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      is_set = true;
      at = std::chrono::steady_clock::now();
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_set; });
  }
};
using Event = std::shared_ptr<Flag>;

c10::Device the_device() { return {kSimulated, 0}; }
c10::Stream as_stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSimulated; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return as_stream(current_id); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::mutex> lock(streams_mutex);
    all_streams().push_back(new Stream());
    return as_stream(static_cast<c10::StreamId>(all_streams().size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = as_stream(current_id);
    current_id = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return find_stream(stream.id()).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    find_stream(stream.id()).wait();
    check_device();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    size_t count;
    {
      std::lock_guard<std::mutex> lock(streams_mutex);
      count = all_streams().size();
    }
    for (size_t id = 0; id < count; ++id) find_stream(static_cast<c10::StreamId>(id)).wait();
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    check_device();
    auto flag = std::make_shared<Flag>();
    if (*event) *static_cast<Event*>(*event) = flag;
    else *event = new Event(flag);
    find_stream(stream.id()).put([flag] { flag->set(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto flag = *static_cast<Event*>(event);
    find_stream(stream.id()).put([flag] { flag->wait(); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto flag = *static_cast<Event*>(event);
    std::lock_guard<std::mutex> lock(flag->mutex);
    return flag->is_set;
  }
  void synchronizeEvent(void* event) const override {
    if (event) (*static_cast<Event*>(event))->wait();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "simulated error: an event that was never recorded has no time");
    auto from = *static_cast<Event*>(begin), to = *static_cast<Event*>(end);
    from->wait();
    to->wait();
    return std::chrono::duration<double, std::milli>(to->at - from->at).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory, given back in the order of the stream on which it was taken, as a caching allocator does

struct Block {
  void* data;
  size_t num_bytes;
  c10::StreamId stream;
};

struct Memory final : c10::Allocator {
  static void give_back(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated_bytes -= static_cast<int64_t>(block->num_bytes);
    find_stream(block->stream).put([block] {
      std::memset(block->data, 0xEE, block->num_bytes);
      c10::free_cpu(block->data);
      delete block;
    });
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    TORCH_CHECK(!is_lost, "simulated error: the device is lost");
    auto limit = memory_limit.load();
    TORCH_CHECK_WITH(OutOfMemoryError, limit < 0 || allocated_bytes + static_cast<int64_t>(num_bytes) <= limit,
                     "simulated error: out of memory, ", num_bytes, " bytes were asked for");
    allocated_bytes += static_cast<int64_t>(num_bytes);
    auto* block = new Block{c10::alloc_cpu(std::max<size_t>(num_bytes, 1)), num_bytes, current_id};
    return {block->data, block, &Memory::give_back, the_device()};
  }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
} the_memory;
REGISTER_ALLOCATOR(kSimulated, &the_memory)

std::mutex pins_mutex;
std::map<uintptr_t, size_t> pins;

// Says whether the range is pinned; one that lies in two pinned ranges, or partly in one, is an error.
bool is_pinned(const void* data, size_t num_bytes) {
  std::lock_guard<std::mutex> lock(pins_mutex);
  auto begin = reinterpret_cast<uintptr_t>(data), end = begin + num_bytes;
  for (auto& [address, size] : pins) {
    if (begin >= address + size || end <= address) continue;
    TORCH_CHECK(begin >= address && end <= address + size, "simulated error: a copy reaches over the end of a pinned range");
    return true;
  }
  return false;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    current_stream().wait();
    auto data = the_memory.allocate(num_bytes);
    std::memcpy(data.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};
const bool is_hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// ---- kernels

// The same memory as a tensor of the host, which keeps it alive, and nothing of Python's.
at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto storage = tensor.storage();
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
}

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSimulated; }

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  check_device();
  auto from = on_host(self), to = on_host(target);
  bool to_host = !is_here(target), is_late = true;
  if (!is_here(self)) from = from.clone();  // what is not pinned is taken at once, as a driver does
  if (to_host) {
    TORCH_CHECK(copies_until_failure < 0 || copies_until_failure-- > 0, "simulated error: a copy failed");
    if (copies_until_exit >= 0 && copies_until_exit-- == 0) std::_Exit(9);
    is_late = is_pinned(target.data_ptr(), target.nbytes()) && non_blocking;
  }
  launch([from, to]() mutable { to.copy_(from); });
  if (!is_late) current_stream().wait();
  return target;
}

// An argument as a kernel gets it: memory by reference, what lies on the host by value.
c10::IValue as_argument(const c10::IValue& value) {
  auto convert = [](const at::Tensor& tensor) {
    return !tensor.defined() ? tensor : is_here(tensor) ? on_host(tensor) : tensor.clone();
  };
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const auto& tensor : value.toTensorVector()) tensors.push_back(convert(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor.has_value() ? std::optional<at::Tensor>(convert(*tensor)) : std::nullopt);
    return tensors;
  }
  return value;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Whether all that a kernel writes is there, so that it can run late.
bool can_be_late(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return false;  // it would take turns with the host's generator
  for (const auto& result : schema.returns())
    if (!writes(result) || result.type()->kind() != c10::TypeKind::TensorType) return false;
  bool has_target = false;
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    if (!writes(schema.arguments()[place])) continue;
    const auto& value = torch::jit::peek(stack, place, schema.arguments().size());
    auto targets = value.isTensor() ? std::vector<at::Tensor>{value.toTensor()}
                   : value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{};
    if (targets.empty()) return false;
    for (const auto& target : targets) {
      if (!is_here(target) || target.numel() == 0) return false;
      has_target = true;
    }
  }
  return has_target;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_device();
  if (!can_be_late(op, *stack)) {
    current_stream().wait();
    at::native::cpu_fallback(op, stack);
    return;
  }
  const auto& schema = op.schema();
  auto count = schema.arguments().size();
  torch::jit::Stack arguments, results;
  for (const auto& value : torch::jit::last(*stack, count)) arguments.push_back(as_argument(value));
  for (const auto& result : schema.returns())
    for (size_t place = 0; place < count; ++place)
      if (writes(schema.arguments()[place]) &&
          schema.arguments()[place].alias_info()->afterSets() == result.alias_info()->afterSets())
        results.push_back(torch::jit::peek(*stack, place, count));
  launch([op, arguments]() mutable {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
    op.callBoxed(&arguments);
  });
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(result);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) at::native::resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}
at::Scalar read_scalar(const at::Tensor& self) {
  check_device();
  current_stream().wait();
  return on_host(self).item();
}
at::Tensor make_empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                      std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &the_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor make_empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &the_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", make_empty);
  library.impl("empty_strided", make_empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

}  // namespace

extern "C" {
void simulated_set_delays(int first_us, int other_us) {
  first_delay_us = first_us;
  other_delay_us = other_us;
}
void simulated_limit_memory(int64_t num_bytes) { memory_limit = num_bytes; }
void simulated_limit_pins(int64_t num_bytes) { pin_limit = num_bytes; }
void simulated_fail_copy(int number) { copies_until_failure = number; }
void simulated_exit_in_copy(int number) { copies_until_exit = number; }
void simulated_lose_device() { is_lost = true; }
int64_t simulated_allocated_bytes() { return allocated_bytes; }
int64_t simulated_num_waits() { return num_waits; }
int64_t simulated_pinned_bytes() {
  std::lock_guard<std::mutex> lock(pins_mutex);
  int64_t total = 0;
  for (auto& [address, size] : pins) total += static_cast<int64_t>(size);
  return total;
}
int simulated_pin(uintptr_t address, size_t num_bytes) {
  auto limit = pin_limit.load();
  if (is_lost || (limit >= 0 && simulated_pinned_bytes() + static_cast<int64_t>(num_bytes) > limit)) {
    has_error = true;
    return 2;
  }
  std::lock_guard<std::mutex> lock(pins_mutex);
  pins[address] = num_bytes;
  return 0;
}
int simulated_unpin(uintptr_t address) {
  std::lock_guard<std::mutex> lock(pins_mutex);
  if (is_lost || pins.erase(address) == 0) {
    has_error = true;
    return 1;
  }
  return 0;
}
}
