// Kernels of the simulated accelerator: those of the CPU, on the same memory.

#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <chrono>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace shardwise::sim {

namespace {

int index_of(const std::optional<c10::Device>& device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

at::Tensor over(c10::Storage storage, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor with_form(c10::Storage storage, const at::Tensor& like) {
  auto tensor = over(std::move(storage), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The host's views of the tensors of one call, and the way back.
class Views {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kSim) {
      if (tensor.defined() && tensor.has_storage()) {
        foreign_.insert(tensor.storage().unsafeGetStorageImpl()); // The host's own: no result that could be adopted.
      }
      return tensor;
    }
    device_ = tensor.device().index();
    auto view = host_tensor(tensor);
    pairs_.push_back({tensor, view, view.storage().data()});
    return view;
  }

  c10::IValue of(const c10::IValue& value) {
    if (value.isTensor()) {
      return of(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        views.push_back(of(tensor));
      }
      return views;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        views.push_back(tensor.has_value() ? std::optional<at::Tensor>(of(*tensor)) : std::nullopt);
      }
      return views;
    }
    if (value.isDevice() && value.toDevice().type() == kSim) {
      device_ = index_of(value.toDevice());
      return c10::IValue(c10::Device(c10::DeviceType::CPU));
    }
    return value;
  }

  // A kernel may have given an output another form, or other memory.
  void settle() {
    for (auto& [tensor, view, data] : pairs_) {
      if (view.storage().data() != data) {
        auto* storage = tensor.storage().unsafeGetStorageImpl();
        const size_t num_bytes = view.storage().nbytes();
        auto memory = view.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
        storage->set_data_ptr(adopt(std::move(memory), num_bytes, tensor.device().index()));
        storage->set_nbytes(num_bytes);
      }
      if (view.sizes() != tensor.sizes() || view.strides() != tensor.strides()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
      }
    }
  }

  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) {
      return result;
    }
    for (const auto& pair : pairs_) {
      if (pair.view.is_same(result)) {
        return pair.tensor;
      }
    }
    auto* storage = result.storage().unsafeGetStorageImpl();
    if (foreign_.count(storage) > 0) {
      return result;
    }
    auto found = origins_.find(storage);
    if (found != origins_.end()) {
      return with_form(found->second, result);
    }
    const size_t num_bytes = storage->nbytes();
    auto memory = storage->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
    c10::Storage adopted(
        c10::Storage::use_byte_size_t(), num_bytes, adopt(std::move(memory), num_bytes, device_), c10::GetAllocator(kSim), true);
    kept_.push_back(result.storage());
    origins_.emplace(storage, adopted);
    return with_form(adopted, result);
  }

  c10::IValue back(const c10::IValue& value) {
    if (value.isTensor()) {
      return back(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        results.push_back(back(tensor));
      }
      return results;
    }
    return value;
  }

 private:
  struct Pair {
    at::Tensor tensor;
    at::Tensor view;
    const void* data;
  };

  at::Tensor host_tensor(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = hosts_.find(storage);
    if (found == hosts_.end()) {
      c10::Storage host(
          c10::Storage::use_byte_size_t(),
          storage->nbytes(),
          // It holds on to the device's memory: a collective that is under way may be all that knows of it.
          c10::DataPtr(storage->mutable_data(), new c10::Storage(tensor.storage()), &let_go, c10::Device(c10::DeviceType::CPU)),
          c10::GetCPUAllocator(),
          true);
      found = hosts_.emplace(storage, host).first;
      origins_.emplace(host.unsafeGetStorageImpl(), tensor.storage());
    }
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = view.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    return view;
  }

  static void let_go(void* storage) {
    delete static_cast<c10::Storage*>(storage);
  }

  int device_ = current_device();
  std::unordered_set<c10::StorageImpl*> foreign_;
  std::vector<Pair> pairs_;
  std::vector<c10::Storage> kept_; // So that no other storage gets the address of one that was looked up.
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> origins_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(c10::DispatchKey::CPU),
      "The simulated accelerator runs kernels of the CPU, which has none for ", op.schema().operator_name(), ".");
  const size_t num_arguments = op.schema().arguments().size();
  Views views;
  std::vector<c10::IValue> arguments;
  arguments.reserve(num_arguments);
  for (size_t position = 0; position < num_arguments; ++position) {
    arguments.push_back(views.of(torch::jit::peek(*stack, position, num_arguments)));
  }
  torch::jit::drop(*stack, num_arguments);
  for (auto& argument : arguments) {
    stack->push_back(std::move(argument));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  views.settle();
  const size_t num_results = op.schema().returns().size();
  for (size_t position = stack->size() - num_results; position < stack->size(); ++position) {
    (*stack)[position] = views.back((*stack)[position]);
  }
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const auto meta = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  const size_t num_bytes = at::detail::computeStorageNbytes(size, stride, meta.itemsize());
  auto tensor = over(new_storage(num_bytes, index_of(device)), meta);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const auto meta = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  const size_t num_bytes = at::detail::computeStorageNbytesContiguous(size, meta.itemsize());
  auto tensor = over(new_storage(num_bytes, index_of(device)), meta);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Contiguous) {
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return tensor;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at_element;
  if (offset.has_value()) {
    at_element = offset->expect_int();
  }
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_element);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  }
  const size_t needed =
      at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (needed > impl->storage().nbytes()) {
    resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef(c10::SymInt(numel)), c10::SymIntArrayRef(c10::SymInt(1)));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const auto device = static_cast<int>(self.device().index());
  return set_storage(self, new_storage(0, device), 0, c10::SymIntArrayRef(c10::SymInt(0)), c10::SymIntArrayRef(c10::SymInt(1)));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t needed = at::detail::computeStorageNbytesContiguous(sizes, impl->itemsize(), impl->storage_offset());
  if (needed > impl->storage().nbytes()) {
    resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
  }
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

// A copy to or from the host: cast on the side that it leaves, so that what travels has the target's width.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  const bool from_host = self.device().is_cpu();
  const bool to_host = target.device().is_cpu();
  const int device = from_host ? target.device().index() : self.device().index();
  const auto begin = std::chrono::steady_clock::now();
  {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
    auto view = host_view(target);
    view.copy_(host_view(self));
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const auto num_bytes = static_cast<int64_t>(target.numel() * target.element_size());
  note_copy(device, from_host ? Way::in : to_host ? Way::out : Way::within, num_bytes, seconds);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

// torch chooses kernels of convolutions by device, and leaves those of other devices to them.
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool is_transposed,
    c10::IntArrayRef output_padding,
    int64_t num_groups) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  Views views;
  std::optional<at::Tensor> bias_view;
  if (bias.has_value() && bias->defined()) {
    bias_view = views.of(*bias);
  }
  return views.back(at::convolution(
      views.of(input), views.of(weight), bias_view, stride, padding, dilation, is_transposed, output_padding, num_groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool is_transposed,
    c10::IntArrayRef output_padding,
    int64_t num_groups,
    std::array<bool, 3> wanted) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
  Views views;
  const std::vector<int64_t> bias_size = {grad.size(1)};
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      views.of(grad), views.of(input), views.of(weight), c10::IntArrayRef(bias_size), stride, padding, dilation, is_transposed,
      output_padding, num_groups, wanted);
  return {views.back(grad_input), views.back(grad_weight), views.back(grad_bias)};
}

} // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  return Views().of(tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

} // namespace shardwise::sim
