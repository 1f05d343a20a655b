/* What the parts of the NVML simulator share: devices, the checks at the begin of a call, steering.
 *
 * A call that is missing here raises "function not found" in pynvml, as with an old driver. With
 * CUDASIM_OLD_DRIVER the library is that of R510: what came later is not in it.
 */
#ifndef CUDASIM_NVML_SIM_H
#define CUDASIM_NVML_SIM_H
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include "shared.h"
#include <nvml.h>
#include <pthread.h>
#include <strings.h>

#define API __attribute__((visibility("default")))
#define NO_INSTANCE 0xFFFFFFFFu
#define MAX_GPU_INSTANCES 7

/* A whole GPU; or with CUDASIM_MIG=1 one GPU and the instances that CUDA sees as its devices. */
typedef enum { WHOLE, PARENT, INSTANCE } Kind;
typedef struct { int index; Kind kind; } Device;

int sim_ready(void);
Device *sim_device(nvmlDevice_t device);
cudasim_device *sim_shared(int i);
int sim_mig(void);
void sim_range(const Device *d, int *first, int *end); /* the shared devices that it stands for */
int sim_busy_percent(const Device *d);
double sim_now_s(void);

/* ---- steering (nvml_steering.c) */

/* Counts the call; the return code that the steering gives it, or success. */
nvmlReturn_t sim_call(const char *name, const Device *d);
/* The arguments after WORD of the nth line (from 0) that has it and concerns the device. */
int sim_line(const Device *d, const char *word, int nth, char *args, size_t size);
/* The number after WORD, or what holds otherwise. */
double sim_number(const Device *d, const char *word, double otherwise);
/* Seconds since the steering was written; 0 for one in the environment. */
double sim_age_s(void);

#define READY                                            \
  do {                                                   \
    if (!sim_ready()) return NVML_ERROR_UNINITIALIZED;   \
    nvmlReturn_t refused_ = sim_call(__func__, 0);       \
    if (refused_ != NVML_SUCCESS) return refused_;       \
  } while (0)
#define DEVICE                                                                            \
  if (!sim_ready()) return NVML_ERROR_UNINITIALIZED;                                      \
  Device *d = sim_device(device);                                                         \
  if (!d) return NVML_ERROR_INVALID_ARGUMENT;                                             \
  int i = d->index;                                                                       \
  (void)i;                                                                                \
  if (sim_is_lost(d)) return NVML_ERROR_GPU_IS_LOST;                                      \
  nvmlReturn_t refused_ = sim_call(__func__, d);                                          \
  if (refused_ != NVML_SUCCESS) return refused_
/* What NVML tells of a whole GPU, in MIG mode or not, but of no instance. */
#define GPU_ONLY \
  DEVICE;        \
  if (d->kind == INSTANCE) return NVML_ERROR_NOT_SUPPORTED
/* What it does not tell once MIG is on. */
#define NOT_WITH_MIG \
  DEVICE;            \
  if (d->kind != WHOLE) return NVML_ERROR_NOT_SUPPORTED
#define NUMBER(call, value)                                         \
  API nvmlReturn_t call(nvmlDevice_t device, unsigned int *out) {   \
    GPU_ONLY;                                                       \
    *out = (unsigned int)(value);                                   \
    return NVML_SUCCESS;                                            \
  }

int sim_is_lost(const Device *d);
#endif
