// Memory, devices, streams and events of the simulated accelerator.

#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace shardwise::sim {

namespace {

std::mutex g_lock;
std::array<Account, kMostDevices> g_accounts;
int g_num_devices = 1;
thread_local int t_device = 0;
int64_t g_pinned_capacity = 0;
int64_t g_pinned_bytes = 0;
std::map<const char*, size_t> g_pinned;

std::string mebibytes(int64_t num_bytes) {
  char text[64];
  snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(num_bytes) / (1 << 20));
  return text;
}

void check_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < g_num_devices, "There is no device sim:", device, ": ", g_num_devices, " are simulated.");
}

void book(int device, int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(g_lock);
  Account& account = g_accounts[device];
  if (num_bytes > 0 && account.capacity_bytes > 0 && account.live_bytes + num_bytes > account.capacity_bytes) {
    account.num_refusals += 1;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "sim:", device, " is out of memory: ", mebibytes(num_bytes), " were asked for, but of its ",
        mebibytes(account.capacity_bytes), " only ", mebibytes(account.capacity_bytes - account.live_bytes), " are free (",
        mebibytes(account.live_bytes), " are in use).", account.advice.empty() ? "" : " ", account.advice);
  }
  account.live_bytes += num_bytes;
  account.peak_bytes = std::max(account.peak_bytes, account.live_bytes);
  account.told_peak_bytes = std::max(account.told_peak_bytes, account.live_bytes);
  account.num_allocations += num_bytes > 0;
}

// A block of the device, and the host's memory under it.
struct Block {
  c10::DataPtr memory;
  size_t num_bytes;
  int device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  book(block->device, -static_cast<int64_t>(block->num_bytes));
  delete block;
}

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const int device = t_device;
    book(device, static_cast<int64_t>(num_bytes)); // Refuse before the host's memory is touched.
    c10::DataPtr memory;
    try {
      memory = c10::GetCPUAllocator()->allocate(num_bytes);
    } catch (...) {
      book(device, -static_cast<int64_t>(num_bytes));
      throw;
    }
    void* data = memory.get();
    auto* block = new Block{std::move(memory), num_bytes, device};
    return {data, block, &release, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_device(device);
    const Account now = account(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = now.live_bytes;
      (*bytes)[0].peak = now.told_peak_bytes;
    }
    stats.allocation[0].allocated = now.num_allocations;
    stats.num_ooms = now.num_refusals;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset_traffic(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_told_peak(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_device(device);
    const Account now = account(device);
    const int64_t total = now.capacity_bytes > 0 ? now.capacity_bytes : now.live_bytes;
    return {total - now.live_bytes, total};
  }
};

SimAllocator g_allocator;
REGISTER_ALLOCATOR(kSim, &g_allocator);

// Memory of the host that a real device could reach by itself: counted, and refused past a limit.
void release_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(g_lock);
    g_pinned.erase(static_cast<const char*>(block->memory.get()));
    g_pinned_bytes -= static_cast<int64_t>(block->num_bytes);
  }
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(num_bytes);
    void* data = memory.get();
    {
      std::lock_guard<std::mutex> guard(g_lock);
      TORCH_CHECK(
          g_pinned_capacity <= 0 || g_pinned_bytes + static_cast<int64_t>(num_bytes) <= g_pinned_capacity,
          "No pinned memory is left: ", mebibytes(num_bytes), " were asked for, but of ", mebibytes(g_pinned_capacity),
          " ", mebibytes(g_pinned_bytes), " are in use.");
      g_pinned[static_cast<const char*>(data)] = num_bytes;
      g_pinned_bytes += static_cast<int64_t>(num_bytes);
    }
    return {data, new Block{std::move(memory), num_bytes, 0}, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
};

PinnedAllocator g_pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(g_num_devices);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(t_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = static_cast<c10::DeviceIndex>(t_device);
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? static_cast<c10::DeviceIndex>(t_device) : exchangeDevice(device);
  }
  // The device draws from the host's generator: the same numbers as on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(g_lock);
    const auto* address = static_cast<const char*>(data);
    auto found = g_pinned.upper_bound(address);
    return found != g_pinned.begin() && address < (--found)->first + found->second;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &g_pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

// One stream in effect: all that is asked for is done when it is asked for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    if (device.has_index()) {
      set_current_device(device.index());
    }
    return before;
  }
  c10::Device getDevice() const override {
    return {kSim, static_cast<c10::DeviceIndex>(t_device)};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      t_device = device.index();
    }
  }
  c10::Stream stream_of(c10::Device device) const {
    const auto index = device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(t_device);
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, index));
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(g_num_devices);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new std::chrono::steady_clock::time_point;
    }
    *static_cast<std::chrono::steady_clock::time_point*>(*event) = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<std::chrono::steady_clock::time_point*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto begin = *static_cast<std::chrono::steady_clock::time_point*>(first);
    const auto end = *static_cast<std::chrono::steady_clock::time_point*>(second);
    return std::chrono::duration<double, std::milli>(end - begin).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool g_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks); // Lives as long as the process, as torch's own do.
  return true;
}();

} // namespace

void configure(int devices, int64_t capacity_bytes, double bytes_per_second) {
  TORCH_CHECK(devices >= 1 && devices <= kMostDevices, "From 1 to ", kMostDevices, " devices can be simulated, not ", devices, ".");
  std::lock_guard<std::mutex> guard(g_lock);
  g_num_devices = devices;
  for (auto& account : g_accounts) {
    account.capacity_bytes = capacity_bytes;
    account.bytes_per_second = bytes_per_second;
  }
}

int num_devices() {
  return g_num_devices;
}

int current_device() {
  return t_device;
}

void set_current_device(int device) {
  check_device(device);
  t_device = device;
}

Account account(int device) {
  check_device(device);
  std::lock_guard<std::mutex> guard(g_lock);
  return g_accounts[device];
}

void reset_peak(int device) {
  check_device(device);
  std::lock_guard<std::mutex> guard(g_lock);
  g_accounts[device].peak_bytes = g_accounts[device].told_peak_bytes = g_accounts[device].live_bytes;
}

void reset_told_peak(int device) {
  check_device(device);
  std::lock_guard<std::mutex> guard(g_lock);
  g_accounts[device].told_peak_bytes = g_accounts[device].live_bytes;
}

void reset_traffic(int device) {
  check_device(device);
  std::lock_guard<std::mutex> guard(g_lock);
  Account& account = g_accounts[device];
  account.in_bytes = account.out_bytes = account.within_bytes = account.num_allocations = 0;
}

void set_capacity(int device, int64_t capacity_bytes) {
  check_device(device);
  std::lock_guard<std::mutex> guard(g_lock);
  g_accounts[device].capacity_bytes = capacity_bytes;
}

void set_advice(int device, const std::string& advice) {
  check_device(device);
  std::lock_guard<std::mutex> guard(g_lock);
  g_accounts[device].advice = advice;
}

void set_bandwidth(int device, double bytes_per_second) {
  check_device(device);
  std::lock_guard<std::mutex> guard(g_lock);
  g_accounts[device].bytes_per_second = bytes_per_second;
}

void note_copy(int device, Way way, int64_t num_bytes, double seconds) {
  double rest = 0;
  {
    std::lock_guard<std::mutex> guard(g_lock);
    Account& account = g_accounts[device];
    (way == Way::in ? account.in_bytes : way == Way::out ? account.out_bytes : account.within_bytes) += num_bytes;
    if (way != Way::within && account.bytes_per_second > 0) {
      rest = static_cast<double>(num_bytes) / account.bytes_per_second - seconds;
    }
  }
  if (rest > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(rest));
  }
}

void set_pinned_capacity(int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(g_lock);
  g_pinned_capacity = num_bytes;
}

int64_t pinned_bytes() {
  std::lock_guard<std::mutex> guard(g_lock);
  return g_pinned_bytes;
}

c10::DataPtr adopt(c10::DataPtr memory, size_t num_bytes, int device) {
  book(device, static_cast<int64_t>(num_bytes));
  void* data = memory.get();
  auto* block = new Block{std::move(memory), num_bytes, device};
  return {data, block, &release, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
}

c10::Storage new_storage(size_t num_bytes, int device) {
  const int before = t_device;
  set_current_device(device);
  c10::DataPtr memory;
  try {
    memory = g_allocator.allocate(num_bytes);
  } catch (...) {
    t_device = before;
    throw;
  }
  t_device = before;
  return {c10::Storage::use_byte_size_t(), num_bytes, std::move(memory), &g_allocator, true};
}

void resize_storage(c10::StorageImpl* storage, size_t num_bytes) {
  TORCH_CHECK(storage->resizable(), "This memory of the simulated device cannot be resized.");
  c10::Storage fresh = new_storage(num_bytes, storage->device().index());
  const size_t kept = std::min(num_bytes, storage->nbytes());
  if (kept > 0) {
    std::memcpy(fresh.mutable_data(), storage->data(), kept);
  }
  storage->set_data_ptr(fresh.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, storage->device())));
  storage->set_nbytes(num_bytes);
}

} // namespace shardwise::sim
