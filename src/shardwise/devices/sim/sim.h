// A simulated accelerator: its memory is the host's, but it is counted, limited, and reached by copies that are counted.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <string>

namespace shardwise::sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 64;

// What one device holds and what has moved to and from it.
struct Account {
  int64_t capacity_bytes = 0; // 0: no limit.
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t told_peak_bytes = 0; // What torch is told: since its own statistics were reset.
  int64_t num_allocations = 0;
  int64_t num_refusals = 0;
  int64_t in_bytes = 0; // From the host.
  int64_t out_bytes = 0; // To the host.
  int64_t within_bytes = 0;
  std::string advice; // What is said when memory runs out.
  double bytes_per_second = 0; // Of copies to and from the host; 0: as fast as they go.
};

enum class Way { in, out, within };

void configure(int num_devices, int64_t capacity_bytes, double bytes_per_second);
int num_devices();
int current_device();
void set_current_device(int device);
Account account(int device);
void reset_peak(int device);
void reset_told_peak(int device);
void reset_traffic(int device);
void set_capacity(int device, int64_t capacity_bytes);
void set_advice(int device, const std::string& advice);
void set_bandwidth(int device, double bytes_per_second);
void note_copy(int device, Way way, int64_t num_bytes, double seconds);
void set_pinned_capacity(int64_t num_bytes);
int64_t pinned_bytes();

// Memory of the host that from here on belongs to a device; throws OutOfMemoryError where it is too much.
c10::DataPtr adopt(c10::DataPtr memory, size_t num_bytes, int device);
c10::Storage new_storage(size_t num_bytes, int device);
void resize_storage(c10::StorageImpl* storage, size_t num_bytes);

// The host's view of a tensor on the device: the same memory.
at::Tensor host_view(const at::Tensor& tensor);

} // namespace shardwise::sim
