/* Memory errors, the driver's wishes, and events. */
#include "nvml_sim.h"

API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *now, nvmlEnableState_t *later) { GPU_ONLY; *now = *later = NVML_FEATURE_ENABLED; return NVML_SUCCESS; }
/* "ecc CORRECTED UNCORRECTED" */
API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t t, nvmlEccCounterType_t c, unsigned long long *out) {
  GPU_ONLY;
  (void)c;
  char args[64];
  unsigned long long count[2] = {0, 0};
  if (sim_line(d, "ecc", 0, args, sizeof args)) sscanf(args, "%llu %llu", &count[0], &count[1]);
  *out = count[t == NVML_MEMORY_ERROR_TYPE_UNCORRECTED];
  return NVML_SUCCESS;
}
/* "remapped CORRECTABLE UNCORRECTABLE PENDING FAILED" */
API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  NOT_WITH_MIG;
  char args[64];
  *corrected = *uncorrected = *pending = *failed = 0;
  if (sim_line(d, "remapped", 0, args, sizeof args)) sscanf(args, "%u %u %u %u", corrected, uncorrected, pending, failed);
  return NVML_SUCCESS;
}
NUMBER(nvmlDeviceGetPcieReplayCounter, sim_number(d, "replays", 0))

/* ---- events: each "xid CODE" that is new since the last look is one; so is a GPU that is lost.
 * Earlier ones are not told again: a set begins where the steering stands at the registration. */
typedef struct { Device *d; int seen; } Registered;
struct nvmlEventSet_st { Registered gpu[CUDASIM_MAX_DEVICES]; int n; };

static int xids(const Device *d) {
  char args[64];
  int n = 0;
  while (sim_line(d, "xid", n, args, sizeof args)) n++;
  return n;
}
API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out) { READY; *out = calloc(1, sizeof **out); return NVML_SUCCESS; }
API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { READY; free(set); return NVML_SUCCESS; }
API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *out) { GPU_ONLY; *out = nvmlEventTypeXidCriticalError; return NVML_SUCCESS; }
API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
  GPU_ONLY;
  if (types & ~(unsigned long long)nvmlEventTypeXidCriticalError) return NVML_ERROR_NOT_SUPPORTED;
  if (set->n == CUDASIM_MAX_DEVICES) return NVML_ERROR_INSUFFICIENT_RESOURCES;
  set->gpu[set->n++] = (Registered){d, xids(d)};
  return NVML_SUCCESS;
}
static void tell(nvmlEventData_t *out, Device *d, unsigned long long code, unsigned instance) {
  memset(out, 0, sizeof *out);
  out->device = (nvmlDevice_t)d;
  out->eventType = nvmlEventTypeXidCriticalError;
  out->eventData = code;
  out->gpuInstanceId = instance;
  out->computeInstanceId = instance == NO_INSTANCE ? NO_INSTANCE : 0;
}
API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout_ms) {
  READY;
  int64_t until = cudasim_now() + timeout_ms * 1000000ll;
  do {
    for (int k = 0; k < set->n; k++) {
      Registered *r = &set->gpu[k];
      char args[64];
      unsigned long long code;
      unsigned instance = NO_INSTANCE;
      if (r->d && sim_is_lost(r->d)) { /* told once */
        tell(out, r->d, 79, NO_INSTANCE);
        r->d = 0;
        return NVML_SUCCESS;
      }
      if (!r->d || !sim_line(r->d, "xid", r->seen, args, sizeof args)) continue;
      r->seen++;
      if (sscanf(args, "%llu %u", &code, &instance) < 1) continue;
      tell(out, r->d, code, instance);
      return NVML_SUCCESS;
    }
    struct timespec t = {0, 10000000};
    nanosleep(&t, 0);
  } while (cudasim_now() < until);
  return NVML_ERROR_TIMEOUT;
}
