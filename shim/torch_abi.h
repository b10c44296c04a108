/* torch_abi.h: the part of torch's C shim (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h) that we
 * use, declared in C. Floor: torch 2.10; no symbol used here was removed since 2.8. Symbols are resolved at run time
 * with dlsym from the libtorch that is already in the process, so this library links to no torch and one binary serves
 * all versions. */
#ifndef DEEPC_TORCH_ABI_H
#define DEEPC_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *dct_tensor; /* AtenTensorHandle */
typedef void *dct_list; /* StableListHandle */
typedef void *dct_library; /* TorchLibraryHandle */
typedef uint64_t dct_value; /* StableIValue: int64, double bits, bool or a handle */
typedef void (*dct_kernel)(dct_value *stack, uint64_t num_args, uint64_t num_outputs);

/* The version that our schemas and conversions were written against: a promise to torch about their behaviour. */
#define DCT_BUILD_VERSION ((2ULL << 56) | (10ULL << 48))

/* DCT_SYMBOL(result, name, (parameters)): all must exist in libtorch_cpu.so. int32_t results: 0 is success. */
#define DCT_SYMBOLS(DCT_SYMBOL)                                                                                    \
  DCT_SYMBOL(int32_t, aoti_torch_library_init_fragment, (const char *, const char *, uint32_t, dct_library *))     \
  DCT_SYMBOL(int32_t, aoti_torch_library_init_impl,                                                                \
             (const char *, const char *, const char *, uint32_t, dct_library *))                                  \
  DCT_SYMBOL(int32_t, aoti_torch_library_def, (dct_library, const char *))                                         \
  DCT_SYMBOL(int32_t, torch_library_impl, (dct_library, const char *, dct_kernel, uint64_t))                       \
  DCT_SYMBOL(int32_t, aoti_torch_delete_tensor_object, (dct_tensor))                                               \
  DCT_SYMBOL(int32_t, aoti_torch_get_data_ptr, (dct_tensor, void **))                                              \
  DCT_SYMBOL(int32_t, aoti_torch_get_numel, (dct_tensor, int64_t *))                                               \
  DCT_SYMBOL(int32_t, aoti_torch_get_dtype, (dct_tensor, int32_t *))                                               \
  DCT_SYMBOL(int32_t, aoti_torch_get_device_type, (dct_tensor, int32_t *))                                         \
  DCT_SYMBOL(int32_t, aoti_torch_get_device_index, (dct_tensor, int32_t *))                                        \
  DCT_SYMBOL(int32_t, aoti_torch_get_dim, (dct_tensor, int64_t *))                                                 \
  DCT_SYMBOL(int32_t, aoti_torch_get_sizes, (dct_tensor, int64_t **))                                              \
  DCT_SYMBOL(int32_t, aoti_torch_get_strides, (dct_tensor, int64_t **))                                            \
  DCT_SYMBOL(int32_t, aoti_torch_is_contiguous, (dct_tensor, bool *))                                              \
  DCT_SYMBOL(int32_t, aoti_torch_empty_strided,                                                                    \
             (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, dct_tensor *))                 \
  DCT_SYMBOL(int32_t, torch_list_size, (dct_list, size_t *))                                                       \
  DCT_SYMBOL(int32_t, torch_list_get_item, (dct_list, size_t, dct_value *))                                        \
  DCT_SYMBOL(int32_t, torch_delete_list, (dct_list))                                                               \
  DCT_SYMBOL(int32_t, torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *)) \
  DCT_SYMBOL(int32_t, torch_get_num_threads, (uint32_t *))                                                         \
  DCT_SYMBOL(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))                   \
  DCT_SYMBOL(int32_t, aoti_torch_device_type_cpu, (void))                                                          \
  DCT_SYMBOL(int32_t, aoti_torch_device_type_cuda, (void))                                                         \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_float32, (void))                                                            \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_bfloat16, (void))                                                           \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_float16, (void))                                                            \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_float64, (void))                                                            \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_int8, (void))                                                               \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_uint8, (void))                                                              \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_int16, (void))                                                              \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_int32, (void))                                                              \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_int64, (void))                                                              \
  DCT_SYMBOL(int32_t, aoti_torch_dtype_bool, (void))

typedef struct dct_api {
#define DCT_FIELD(result, name, params) result(*name) params;
  DCT_SYMBOLS(DCT_FIELD)
#undef DCT_FIELD
  /* In libtorch_cuda.so; NULL on CPU builds of torch. */
  int32_t (*aoti_torch_get_current_cuda_stream)(int32_t device_index, void **stream);
} dct_api;

/* Fills the table. NULL on success, else a static or thread-local text that names what is missing. */
const char *dct_resolve(dct_api *api);

#endif
