// GPUs of host memory, for TensorFlow's CPU build of the version that this is compiled with.
//
// TensorFlow places ops on them, allocates, copies and sends as it does with GPUs. A kernel is the
// CPU's; kernels.pbtxt says for which ops there is one, and which arguments lie on the host.
//
//     TOWERS_TEST_GPUS=2            how many there are
//     TOWERS_TEST_GPU_MIB=1024      memory of each
//     CUDA_VISIBLE_DEVICES=1,0      as CUDA reads it, by numbers

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/text_format.h"
#include "tensorflow/core/common_runtime/copy_tensor.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/gpu/gpu_id_manager.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/common_runtime/pluggable_device/pluggable_device_bfc_allocator.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/grappler/grappler_item.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer_registry.h"
#include "tensorflow/core/public/session_options.h"
#include "xla/stream_executor/platform_manager.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

asm(R"(
    .section .rodata
    kernels_text: .incbin "kernels.pbtxt"
    .byte 0
    .previous
)");
extern const char kernels_text[] __attribute__((visibility("hidden")));

namespace tensorflow {
namespace {

constexpr char kName[] = "GPU of host memory";
constexpr char kCapability[] = "8.0";

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  int64_t number;
  return value && absl::SimpleAtoi(value, &number) ? number : otherwise;
}

// Returns the numbers of the GPUs that CUDA shows: those that are listed before the first mistake.
const std::vector<int>& Visible() {
  static const auto* visible = [] {
    auto* found = new std::vector<int>;
    const int count = FromEnvironment("TOWERS_TEST_GPUS", 2);
    const char* listed = std::getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; i < count && !listed; ++i) found->push_back(i);
    for (absl::string_view part : absl::StrSplit(listed ? listed : "", ',')) {
      int number;
      if (!absl::SimpleAtoi(part, &number) || number < 0 || number >= count) break;
      found->push_back(number);
    }
    return found;
  }();
  return *visible;
}

// Memory.

class Memory : public tsl::SubAllocator {  // BFCAllocator takes regions from it
 public:
  explicit Memory(int gpu) : SubAllocator({}, {}), taken_(Taken(gpu)) {}

  static int64_t Total() { return FromEnvironment("TOWERS_TEST_GPU_MIB", 1024) << 20; }
  static int64_t Available(int gpu) { return Total() - Taken(gpu); }

  void* Alloc(size_t, size_t num_bytes, size_t* received) override {
    *received = num_bytes;
    if ((taken_ += num_bytes) <= Total()) {
      void* memory =
          mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory != MAP_FAILED) return memory;
    }
    taken_ -= num_bytes;
    return nullptr;
  }

  void Free(void* memory, size_t num_bytes) override {
    munmap(memory, num_bytes);
    taken_ -= num_bytes;
  }

  bool SupportsCoalescing() const override { return false; }

 private:
  static std::atomic<int64_t>& Taken(int gpu) {
    static auto* taken = new std::map<int, std::atomic<int64_t>>;
    return (*taken)[gpu];
  }

  std::atomic<int64_t>& taken_;
};

void Copy(const Tensor* from, Tensor* to, const StatusCallback& done) {
  // So a copy between TensorFlow's devices says that there is no memory for it.
  if (!to->IsInitialized()) return done(absl::InternalError("Dst tensor is not initialized."));
  const absl::string_view bytes = from->tensor_data();
  if (!bytes.empty()) {
    std::memmove(const_cast<char*>(to->tensor_data().data()), bytes.data(), bytes.size());
  }
  done(absl::OkStatus());
}

struct Copies : DeviceContext {
  void CopyCPUTensorToDevice(const Tensor* from, Device*, Tensor* to, StatusCallback done,
                             bool) const override {
    Copy(from, to, done);
  }
  void CopyDeviceTensorToCPU(const Tensor* from, absl::string_view, Device*, Tensor* to,
                             StatusCallback done) override {
    Copy(from, to, done);
  }
  void CopyTensorInSameDevice(const Tensor* from, Device*, Tensor* to,
                              StatusCallback done) const override {
    Copy(from, to, done);
  }
  absl::Status ThenExecute(Device*, stream_executor::Stream*, std::function<void()> f) override {
    f();  // a kernel has computed when it returns: there is nothing to wait for
    return absl::OkStatus();
  }
};

// TensorFlow has a copy between GPUs of its own, which a device that is called pluggable goes past.
const absl::Status between_gpus = CopyTensor::Register(
    DEVICE_GPU, DEVICE_GPU,
    [](DeviceContext*, DeviceContext*, Device*, Device*, const AllocatorAttributes,
       const AllocatorAttributes, const Tensor* from, Tensor* to, int, StatusCallback done) {
      Copy(from, to, done);
    },
    /*is_pluggable_device=*/true);

// Devices.

class Gpu : public LocalDevice {
 public:
  Gpu(const SessionOptions& options, const DeviceAttributes& attributes, Allocator* memory)
      : LocalDevice(options, attributes), memory_(memory) {
    info_.default_context = copies_.get();
    info_.stream = stream_.get();
    set_tensorflow_accelerator_device_info(&info_);
  }

  Allocator* GetAllocator(AllocatorAttributes attributes) override {
    return attributes.on_host() ? cpu_allocator() : memory_;
  }

  absl::Status Sync() override { return absl::OkStatus(); }

  absl::Status TryGetDeviceContext(DeviceContext** context) override {
    *context = copies_.get();
    copies_->Ref();
    return absl::OkStatus();
  }

  absl::Status MakeTensorFromProto(const TensorProto& proto, const AllocatorAttributes attributes,
                                   Tensor* tensor) override {
    if (!tensor->FromProto(cpu_allocator(), proto)) {
      return absl::InvalidArgumentError(absl::StrCat("no tensor: ", proto.ShortDebugString()));
    }
    if (attributes.on_host() || !DataTypeCanUseMemcpy(tensor->dtype())) return absl::OkStatus();
    const Tensor parsed = *tensor;
    *tensor = Tensor(memory_, parsed.dtype(), parsed.shape());
    if (!tensor->IsInitialized()) {
      return absl::ResourceExhaustedError(absl::StrCat("OOM: a constant on ", name()));
    }
    Copy(&parsed, tensor, [](const absl::Status&) {});
    return absl::OkStatus();
  }

  void CopyTensorInSameDevice(const Tensor* from, Tensor* to, const DeviceContext*,
                              StatusCallback done) override {
    Copy(from, to, done);
  }

 private:
  Allocator* const memory_;
  const core::RefCountPtr<DeviceContext> copies_{new Copies};
  // By which XLA finds out whom to compile for; nothing is put into it.
  const std::unique_ptr<stream_executor::Stream> stream_ =
      stream_executor::PlatformManager::PlatformWithName("Host")
          .value()
          ->ExecutorForDevice(0)
          .value()
          ->CreateStream()
          .value();
  AcceleratorDeviceInfo info_;
};

class Factory : public DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    for (int i = 0; i < Visible().size(); ++i) {
      devices->push_back(absl::StrCat("/physical_device:GPU:", i));
    }
    return absl::OkStatus();
  }

  absl::Status GetDeviceDetails(
      int, std::unordered_map<std::string, std::string>* details) override {
    *details = {{"device_name", kName}, {"compute_capability", kCapability}};
    return absl::OkStatus();
  }

  absl::Status CreateDevices(const SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    const GPUOptions& asked = options.config.gpu_options();
    int id = 0, num_used = 0;
    for (int gpu : Chosen(options.config)) {
      std::vector<int64_t> limits;  // one for each logical device
      if (num_used < asked.experimental().virtual_devices_size()) {
        for (int64_t mib : asked.experimental().virtual_devices(num_used).memory_limit_mb()) {
          limits.push_back(mib << 20);
        }
      }
      if (limits.empty()) {
        const double fraction = asked.per_process_gpu_memory_fraction();
        limits = {fraction ? int64_t(Memory::Total() * fraction) : Memory::Available(gpu)};
      }
      ++num_used;
      for (int64_t limit : limits) {
        const std::string description =
            absl::StrCat("device: ", id, ", name: ", kName, ", pci bus id: 0000:0", gpu + 1,
                         ":00.0, compute capability: ", kCapability);
        const DeviceAttributes attributes =
            Device::BuildDeviceAttributes(absl::StrCat(prefix, "/device:GPU:", id), DEVICE_GPU,
                                          Bytes(limit), DeviceLocality(), description);
        // A process has one allocator for each, whatever later sessions ask for.
        static auto* allocators = new std::map<int, PluggableDeviceBFCAllocator*>;
        auto& allocator = (*allocators)[id];
        if (!allocator) {
          allocator = new PluggableDeviceBFCAllocator(new Memory(gpu), limit, asked,
                                                      absl::StrCat("GPU_", id, "_bfc"), false);
        }
        devices->push_back(std::make_unique<Gpu>(options, attributes, allocator));
        GpuIdManager::InsertTfPlatformDeviceIdPair(tsl::TfDeviceId(id), tsl::PlatformDeviceId(gpu));
        ++id;
      }
    }
    return absl::OkStatus();
  }

 private:
  static std::vector<int> Chosen(const ConfigProto& config) {
    std::vector<int> chosen = Visible();
    if (const std::string& list = config.gpu_options().visible_device_list(); !list.empty()) {
      chosen.clear();
      for (absl::string_view part : absl::StrSplit(list, ',')) {
        int place;
        if (absl::SimpleAtoi(part, &place)) chosen.push_back(Visible().at(place));
      }
    }
    const auto most = config.device_count().find(DEVICE_GPU);
    if (most != config.device_count().end() && most->second < chosen.size()) {
      chosen.resize(most->second);
    }
    return chosen;
  }
};

// Leaves graphs as they are. It is there for what is registered with it: no NCHW, which the CPU's
// kernels do not know, and no fused ops, which they know in other forms.
struct AsTheyAre : grappler::CustomGraphOptimizer {
  absl::Status Init(const RewriterConfig_CustomGraphOptimizer*) override {
    return absl::OkStatus();
  }
  std::string name() const override { return "as_they_are"; }
  bool UsesFunctionLibrary() const override { return false; }
  absl::Status Optimize(grappler::Cluster*, const grappler::GrapplerItem& item,
                        GraphDef* graph) override {
    *graph = item.graph;
    return absl::OkStatus();
  }
};

// Kernels.

void SetMemoryTypes(const MemoryTypeVector& of_kernel, const MemoryTypeSlice& wanted) {
  std::copy(wanted.begin(), wanted.end(), const_cast<MemoryTypeVector&>(of_kernel).begin());
}

// Returns the CPU's kernel for a node, with its arguments where a GPU's kernel has them.
OpKernel* MakeKernel(OpKernelConstruction* context) {
  DeviceBase* device = context->device();
  std::shared_ptr<const NodeProperties> node;
  OpKernel* kernel = nullptr;
  absl::Status status =
      NodeProperties::CreateFromNodeDef(context->def(), OpRegistry::Global(), &node);
  if (status.ok()) {
    status = CreateOpKernel(DEVICE_CPU, device, device->GetAllocator(AllocatorAttributes()),
                            context->function_library(), context->resource_manager(), node,
                            context->graph_def_version(), &kernel);
  }
  if (!status.ok()) {
    context->CtxFailure(absl::Status(
        status.code(), absl::StrCat("tests/gpu has only the CPU's kernels: ", status.message())));
    return nullptr;
  }
  SetMemoryTypes(kernel->input_memory_types(), context->input_memory_types());
  SetMemoryTypes(kernel->output_memory_types(), context->output_memory_types());
  return kernel;
}

const bool registered = [] {
  DeviceFactory::Register(DEVICE_GPU, std::make_unique<Factory>(), /*priority=*/210,
                          /*is_pluggable_device=*/true);
  grappler::ConfigList optimizers(
      false, {{"layout_optimizer", RewriterConfig::OFF}, {"remapping", RewriterConfig::OFF}});
  grappler::PluginGraphOptimizerRegistry::RegisterPluginOptimizerOrDie(
      [] { return new AsTheyAre; }, DEVICE_GPU, optimizers);
  KernelList list;
  CHECK(google::protobuf::TextFormat::ParseFromString(kernels_text, &list));
  for (const KernelDef& kernel : list.kernel()) {
    kernel_factory::OpKernelRegistrar(new KernelDef(kernel), "HostMemoryGpu", MakeKernel);
  }
  return true;
}();

}  // namespace
}  // namespace tensorflow
