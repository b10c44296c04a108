/* torch_abi.c: finds torch's C shim in the running process. libtorch is loaded RTLD_LOCAL by Python, so plain undefined
 * symbols would not resolve; RTLD_NOLOAD gives a handle to what is already there. */
#include "torch_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char abi_text[256];

const char *dct_resolve(dct_api *api) {
  memset(api, 0, sizeof *api);
  void *cpu = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!cpu) return "libtorch_cpu.so is not loaded in this process: import torch before deepc's operators";
#define DCT_RESOLVE(result, name, params)                                                                          \
  *(void **)&api->name = dlsym(cpu, #name);                                                                        \
  if (!api->name) {                                                                                                \
    snprintf(abi_text, sizeof abi_text, "this torch has no C shim function %s: deepc needs torch >= 2.10", #name); \
    return abi_text;                                                                                               \
  }
  DCT_SYMBOLS(DCT_RESOLVE)
#undef DCT_RESOLVE
  void *cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (cuda) *(void **)&api->aoti_torch_get_current_cuda_stream = dlsym(cuda, "aoti_torch_get_current_cuda_stream");
  return NULL;
}
