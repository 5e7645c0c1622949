// Collectives of simulated devices: gloo's, on the host's view of their memory. And what Python calls.

#include "sim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/python.h>

#include <chrono>
#include <memory>

namespace shardwise::sim {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a collective works on: the host's views of the device's memory.
using Holds = std::vector<std::shared_ptr<at::Tensor>>;

// A view that holds on to the device's memory until it goes, or until the hold is emptied: the thread that ran a collective lets go of
// its tensors some time after it has told that it is over, and nobody could say when that memory is free again.
at::Tensor lend(const at::Tensor& tensor, Holds& holds) {
  auto hold = std::make_shared<at::Tensor>(host_view(tensor));
  const at::Tensor& view = *hold;
  auto lent = at::from_blob(view.data_ptr(), view.sizes(), view.strides(), [hold](void*) {}, view.options());
  holds.push_back(std::move(hold));
  return lent;
}

Tensors lend(const Tensors& tensors, Holds& holds) {
  Tensors views;
  for (const auto& tensor : tensors) {
    views.push_back(lend(tensor, holds));
  }
  return views;
}

std::vector<Tensors> lend(const std::vector<Tensors>& lists, Holds& holds) {
  std::vector<Tensors> views;
  for (const auto& list : lists) {
    views.push_back(lend(list, holds));
  }
  return views;
}

// A collective of the host's, whose result is the device's tensors. When it goes and is over, their memory is held here no more.
class SimWork final : public c10d::Work {
 public:
  SimWork(WorkPtr inner, Holds holds, Tensors results)
      : inner_(std::move(inner)), holds_(std::move(holds)), results_(std::move(results)) {}
  ~SimWork() override {
    if (inner_->isCompleted()) {
      for (const auto& hold : holds_) {
        *hold = at::Tensor();
      }
    }
  }

  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  Tensors result() override {
    return results_;
  }
  void synchronize() override {
    inner_->wait();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return inner_->wait(timeout);
  }
  void abort() override {
    inner_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    auto results = results_;
    return inner_->getFuture()->then(
        [results](c10::ivalue::Future& ended) {
          ended.value(); // Throws what the collective threw.
          return c10::IValue(results);
        },
        type);
  }

 private:
  WorkPtr inner_;
  Holds holds_;
  Tensors results_;
};

class SimBackend final : public c10d::Backend {
 public:
  explicit SimBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "sim";
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Holds holds;
    auto views = lend(tensors, holds);
    return wrap(inner_->broadcast(views, options), holds, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Holds holds;
    auto views = lend(tensors, holds);
    return wrap(inner_->allreduce(views, options), holds, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Holds holds;
    auto views = lend(tensors, holds);
    return wrap(inner_->allreduce_coalesced(views, options), holds, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Holds holds;
    auto views = lend(tensors, holds);
    return wrap(inner_->reduce(views, options), holds, tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Holds holds;
    auto out_views = lend(outputs, holds);
    auto in_views = lend(inputs, holds);
    return wrap(inner_->allgather(out_views, in_views, options), holds, outputs.empty() ? Tensors{} : outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Holds holds;
    auto out_view = lend(output, holds);
    auto in_view = lend(input, holds);
    return wrap(inner_->_allgather_base(out_view, in_view, options), holds, {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Holds holds;
    auto out_views = lend(outputs, holds);
    auto in_views = lend(inputs, holds);
    return wrap(inner_->allgather_into_tensor_coalesced(out_views, in_views, options), holds, outputs);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Holds holds;
    auto out_views = lend(outputs, holds);
    auto in_views = lend(inputs, holds);
    return wrap(inner_->gather(out_views, in_views, options), holds, outputs.empty() ? Tensors{} : outputs[0]);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Holds holds;
    auto out_views = lend(outputs, holds);
    auto in_views = lend(inputs, holds);
    return wrap(inner_->scatter(out_views, in_views, options), holds, outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Holds holds;
    auto out_views = lend(outputs, holds);
    auto in_views = lend(inputs, holds);
    return wrap(inner_->reduce_scatter(out_views, in_views, options), holds, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Holds holds;
    auto out_view = lend(output, holds);
    auto in_view = lend(input, holds);
    return wrap(inner_->_reduce_scatter_base(out_view, in_view, options), holds, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Holds holds;
    auto out_views = lend(outputs, holds);
    auto in_views = lend(inputs, holds);
    return wrap(inner_->reduce_scatter_tensor_coalesced(out_views, in_views, options), holds, outputs);
  }
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    Holds holds;
    auto out_view = lend(output, holds);
    auto in_view = lend(input, holds);
    return wrap(inner_->alltoall_base(out_view, in_view, output_sizes, input_sizes, options), holds, {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    Holds holds;
    auto out_views = lend(outputs, holds);
    auto in_views = lend(inputs, holds);
    return wrap(inner_->alltoall(out_views, in_views, options), holds, outputs);
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    Holds holds;
    auto views = lend(tensors, holds);
    return wrap(inner_->send(views, target, tag), holds, {});
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    Holds holds;
    auto views = lend(tensors, holds);
    return wrap(inner_->recv(views, source, tag), holds, tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    Holds holds;
    auto views = lend(tensors, holds);
    return wrap(inner_->recvAnysource(views, tag), holds, tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return inner_->barrier(options);
  }
  void setSequenceNumberForGroup() override {
    inner_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return inner_->getSequenceNumberForGroup();
  }

 private:
  static WorkPtr wrap(WorkPtr inner, Holds holds, Tensors results) {
    return c10::make_intrusive<SimWork>(std::move(inner), std::move(holds), std::move(results));
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Account>(module, "Account")
      .def_readonly("capacity_bytes", &Account::capacity_bytes)
      .def_readonly("live_bytes", &Account::live_bytes)
      .def_readonly("peak_bytes", &Account::peak_bytes)
      .def_readonly("num_allocations", &Account::num_allocations)
      .def_readonly("num_refusals", &Account::num_refusals)
      .def_readonly("in_bytes", &Account::in_bytes)
      .def_readonly("out_bytes", &Account::out_bytes)
      .def_readonly("within_bytes", &Account::within_bytes);
  module.def("configure", &configure);
  module.def("num_devices", &num_devices);
  module.def("current_device", &current_device);
  module.def("set_current_device", &set_current_device);
  module.def("account", &account);
  module.def("reset_peak", &reset_peak);
  module.def("reset_traffic", &reset_traffic);
  module.def("set_capacity", &set_capacity);
  module.def("set_advice", &set_advice);
  module.def("set_bandwidth", &set_bandwidth);
  module.def("set_pinned_capacity", &set_pinned_capacity);
  module.def("pinned_bytes", &pinned_bytes);
  module.def("host_view", &host_view);
  module.def("over", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimBackend>(inner);
  });
}

} // namespace shardwise::sim
