// Stand-in of libcuda's virtual memory calls over the host's memory, of one device, number 1.

#include <cuda.h>
#include <string.h>
#include <sys/mman.h>

#define UNIT ((size_t)1 << 16)
#define MOST 64

static struct { CUdeviceptr address; size_t size; } reservations[MOST];
static struct { CUmemGenericAllocationHandle handle; size_t size; CUdeviceptr mapped; } memory[MOST];
static size_t taken, most = (size_t)1 << 40;
// Beyond 32 bits: a handle that was cut would not be found.
static CUmemGenericAllocationHandle last = (CUmemGenericAllocationHandle)7 << 40;

size_t granularity(void) { return UNIT; }
size_t used(void) { return taken; }
void limit(size_t bytes) { most = bytes; }

size_t reserved(void) {
    size_t sum = 0;
    for (int i = 0; i < MOST; ++i) sum += reservations[i].size;
    return sum;
}

static int as_asked(const CUmemAllocationProp *given) {
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = 1;
    return memcmp(&prop, given, sizeof prop) == 0;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = device == 1 && attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *unit, const CUmemAllocationProp *prop,
                                               CUmemAllocationGranularity_flags option) {
    *unit = UNIT;
    return as_asked(prop) && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                     unsigned long long flags) {
    if (!size || size % UNIT || alignment || hint || flags) return CUDA_ERROR_INVALID_VALUE;
    char *area = mmap(0, size + UNIT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = ((CUdeviceptr)area + UNIT - 1) / UNIT * UNIT;
    for (int i = 0; i < MOST; ++i)
        if (!reservations[i].size) {
            reservations[i].address = *address;
            reservations[i].size = size;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    for (int i = 0; i < MOST; ++i)
        if (memory[i].mapped >= address && memory[i].mapped < address + size) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST; ++i)
        if (size && reservations[i].address == address && reservations[i].size == size) {
            reservations[i].size = 0;
            return munmap((void *)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    if (!size || size % UNIT || flags || !as_asked(prop)) return CUDA_ERROR_INVALID_VALUE;
    if (taken + size > most) return CUDA_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < MOST; ++i)
        if (!memory[i].handle) {
            memory[i].handle = *handle = ++last;
            memory[i].size = size;
            taken += size;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    int inside = 0;
    for (int i = 0; i < MOST; ++i) {
        CUdeviceptr first = reservations[i].address;
        inside |= address >= first && address + size <= first + reservations[i].size;
        if (memory[i].mapped && address < memory[i].mapped + memory[i].size && memory[i].mapped < address + size)
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (!inside || address % UNIT || offset || flags) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST; ++i)
        if (memory[i].handle == handle && memory[i].size == size && !memory[i].mapped) {
            memory[i].mapped = address;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    if (count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->location.id != 1 ||
        access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST; ++i)
        if (memory[i].mapped == address && memory[i].size == size)
            return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
    for (int i = 0; i < MOST; ++i)
        if (memory[i].mapped == address && memory[i].size == size) {
            void *area = mmap((void *)address, size, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            memory[i].mapped = 0;
            return area == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    for (int i = 0; i < MOST; ++i)
        if (handle && memory[i].handle == handle && !memory[i].mapped) {
            memory[i].handle = 0;
            taken -= memory[i].size;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}
