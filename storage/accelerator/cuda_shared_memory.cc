#include "storage/accelerator/cuda_shared_memory.h"

// Without a toolkit nothing calls this.
#ifdef OPTSTATE_HAS_CUDA

#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"

namespace optstate::accelerator {
namespace {

constexpr CUmemAllocationHandleType kFile =
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

// The driver's functions. libcuda.so.1 stays open for the process.
struct Driver {
  decltype(&cuDeviceGetAttribute) device_get_attribute = nullptr;
  decltype(&cuGetErrorString) get_error_string = nullptr;
  decltype(&cuMemGetAllocationGranularity) get_granularity = nullptr;
  decltype(&cuMemGetAllocationPropertiesFromHandle) get_properties = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
};

template <typename Function>
absl::Status Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("libcuda.so.1 has no ", name, ": the driver is too old"));
}

absl::StatusOr<Driver> LoadDriver() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no driver of CUDA: ", dlerror()));
  }
  Driver driver;
  const auto find = [library](const char* name, auto* function) {
    return Find(library, name, function);
  };
  OPTSTATE_RETURN_IF_ERROR(
      find("cuDeviceGetAttribute", &driver.device_get_attribute));
  OPTSTATE_RETURN_IF_ERROR(find("cuGetErrorString", &driver.get_error_string));
  OPTSTATE_RETURN_IF_ERROR(
      find("cuMemGetAllocationGranularity", &driver.get_granularity));
  OPTSTATE_RETURN_IF_ERROR(
      find("cuMemGetAllocationPropertiesFromHandle", &driver.get_properties));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemCreate", &driver.create));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemRelease", &driver.release));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemAddressReserve", &driver.reserve));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemAddressFree", &driver.free_address));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemMap", &driver.map));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemUnmap", &driver.unmap));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemSetAccess", &driver.set_access));
  OPTSTATE_RETURN_IF_ERROR(
      find("cuMemExportToShareableHandle", &driver.export_handle));
  OPTSTATE_RETURN_IF_ERROR(
      find("cuMemImportFromShareableHandle", &driver.import_handle));
  return driver;
}

const absl::StatusOr<Driver>& TheDriver() {
  static const auto* const driver = new absl::StatusOr<Driver>(LoadDriver());
  return *driver;
}

absl::StatusCode CodeOf(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return absl::StatusCode::kResourceExhausted;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_HANDLE:
      return absl::StatusCode::kInvalidArgument;
    // A driver, a container, a partition of a device or a system that shares no
    // memory.
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_OPERATING_SYSTEM:
    case CUDA_ERROR_NOT_INITIALIZED:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

absl::Status Check(const Driver& driver, CUresult result,
                   absl::string_view call) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  driver.get_error_string(result, &text);
  return absl::Status(
      CodeOf(result),
      absl::StrCat(call, ": error ", static_cast<int>(result), ", ",
                   text == nullptr ? "which the driver does not know" : text));
}

CUmemAllocationProp PropertiesOf(int device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kFile;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

absl::Status CheckShares(const Driver& driver, int device) {
  for (const CUdevice_attribute attribute :
       {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
    int shares = 0;
    OPTSTATE_RETURN_IF_ERROR(
        Check(driver, driver.device_get_attribute(&shares, attribute, device),
              "cuDeviceGetAttribute"));
    if (shares == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("CUDA device ", device,
                       " cannot share memory by file descriptors (attribute ",
                       static_cast<int>(attribute), ")"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DeviceAddress> CudaSharedMemory::Allocate(uint64_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(TheDriver().status());
  const Driver& driver = *TheDriver();
  OPTSTATE_RETURN_IF_ERROR(CheckShares(driver, device_));
  const CUmemAllocationProp properties = PropertiesOf(device_);
  size_t page = 0;
  OPTSTATE_RETURN_IF_ERROR(
      Check(driver,
            driver.get_granularity(&page, &properties,
                                   CU_MEM_ALLOC_GRANULARITY_MINIMUM),
            "cuMemGetAllocationGranularity"));
  const uint64_t all = (bytes + page - 1) / page * page;
  CUmemGenericAllocationHandle handle = 0;
  OPTSTATE_RETURN_IF_ERROR(
      Check(driver, driver.create(&handle, all, &properties, 0),
            absl::StrCat("cuMemCreate of ", all, " bytes")));
  return Map(handle, all);
}

absl::StatusOr<DeviceAddress> CudaSharedMemory::Map(uint64_t handle,
                                                    uint64_t bytes) {
  const Driver& driver = *TheDriver();
  CUdeviceptr address = 0;
  absl::Status status =
      Check(driver, driver.reserve(&address, bytes, 0, 0, 0),
            absl::StrCat("cuMemAddressReserve of ", bytes, " bytes"));
  if (!status.ok()) {
    driver.release(handle);
    return status;
  }
  status = Check(driver, driver.map(address, bytes, 0, handle, 0),
                 absl::StrCat("cuMemMap of ", bytes, " bytes"));
  if (status.ok()) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device_;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = Check(driver, driver.set_access(address, bytes, &access, 1),
                   "cuMemSetAccess");
    if (!status.ok()) driver.unmap(address, bytes);
  }
  if (!status.ok()) {
    driver.free_address(address, bytes);
    driver.release(handle);
    return status;
  }
  const absl::MutexLock lock(&mu_);
  mappings_[address] = {bytes, handle};
  return DeviceAddress{address};
}

absl::StatusOr<UniqueFd> CudaSharedMemory::Export(DeviceAddress memory,
                                                  uint64_t* bytes) const {
  const absl::MutexLock lock(&mu_);
  const auto found = mappings_.find(memory.value);
  if (found == mappings_.end()) {
    return absl::InvalidArgumentError(
        "memory that was not allocated to be shared is exported");
  }
  const Driver& driver = *TheDriver();
  int file = -1;
  OPTSTATE_RETURN_IF_ERROR(
      Check(driver, driver.export_handle(&file, found->second.handle, kFile, 0),
            "cuMemExportToShareableHandle"));
  UniqueFd exported(file);
  // A program that the process starts would keep the memory.
  ::fcntl(exported.get(), F_SETFD, FD_CLOEXEC);
  *bytes = found->second.bytes;
  return exported;
}

absl::StatusOr<DeviceAddress> CudaSharedMemory::Import(int file,
                                                       uint64_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(TheDriver().status());
  const Driver& driver = *TheDriver();
  CUmemGenericAllocationHandle handle = 0;
  // The driver takes the number of the file as if it were an address.
  OPTSTATE_RETURN_IF_ERROR(Check(
      driver,
      driver.import_handle(
          &handle, reinterpret_cast<void*>(static_cast<intptr_t>(file)), kFile),
      "cuMemImportFromShareableHandle"));
  CUmemAllocationProp properties = {};
  absl::Status status =
      Check(driver, driver.get_properties(&properties, handle),
            "cuMemGetAllocationPropertiesFromHandle");
  if (status.ok() && properties.location.id != device_) {
    status = absl::InvalidArgumentError(absl::StrCat("memory of CUDA device ",
                                                     properties.location.id,
                                                     " for device ", device_));
  }
  if (!status.ok()) {
    driver.release(handle);
    return status;
  }
  return Map(handle, bytes);
}

bool CudaSharedMemory::Free(DeviceAddress memory) {
  const absl::MutexLock lock(&mu_);
  const auto found = mappings_.find(memory.value);
  if (found == mappings_.end()) return false;
  const Driver& driver = *TheDriver();
  driver.unmap(found->first, found->second.bytes);
  driver.free_address(found->first, found->second.bytes);
  driver.release(found->second.handle);
  mappings_.erase(found);
  return true;
}

}  // namespace optstate::accelerator

#endif  // OPTSTATE_HAS_CUDA
