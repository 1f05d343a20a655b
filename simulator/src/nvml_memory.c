/* Memory and processes, as shared.h has them. */
#include "nvml_sim.h"

static unsigned long long total(const Device *d) {
  int first, end;
  unsigned long long sum = 0;
  sim_range(d, &first, &end);
  for (int i = first; i < end; i++) sum += cudasim_total(i);
  return sum;
}
/* With the driver's own and with processes that the steering adds. */
static unsigned long long used(const Device *d) {
  int first, end;
  unsigned long long sum = 0, mib;
  char args[160];
  sim_range(d, &first, &end);
  for (int i = first; i < end; i++) sum += (unsigned long long)cudasim_used(sim_shared(i));
  for (int nth = 0; sim_line(d, "process", nth, args, sizeof args); nth++)
    if (sscanf(args, "%*u %llu", &mib) == 1) sum += mib * CUDASIM_MIB;
  return sum;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *m) {
  DEVICE;
  m->total = total(d);
  m->used = used(d); /* with the driver's own, as v1 does */
  m->free = m->total > m->used ? m->total - m->used : 0;
  return NVML_SUCCESS;
}
#ifndef CUDASIM_OLD_DRIVER
static unsigned long long base(const Device *d) {
  int first, end;
  sim_range(d, &first, &end);
  return cudasim_base() * (unsigned long long)(end - first);
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *m) {
  DEVICE;
  if (m->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  m->total = total(d);
  m->reserved = base(d);
  m->used = used(d) - m->reserved;
  m->free = m->total > m->used + m->reserved ? m->total - m->used - m->reserved : 0;
  return NVML_SUCCESS;
}
#endif
API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *m) { GPU_ONLY; m->bar1Total = 1ull << 37; m->bar1Used = 1 << 20; m->bar1Free = m->bar1Total - m->bar1Used; return NVML_SUCCESS; }

/* ---- processes: those of the simulator, then "process PID MIB [graphics]" of the steering */
typedef struct { unsigned pid; unsigned long long used; int instance; } Listed;

static unsigned list(const Device *d, int graphics, Listed *out, unsigned room) {
  int first, end;
  unsigned n = 0, pid;
  char args[160];
  double mib;
  sim_range(d, &first, &end);
  for (int i = first; i < end && !graphics; i++) {
    cudasim_reap(sim_shared(i));
    for (int s = 0; s < CUDASIM_SLOTS; s++) {
      cudasim_slot *slot = &sim_shared(i)->slot[s];
      if (slot->pid <= 0 || sim_number(d, "hide_own", 0)) continue;
      if (n < room) out[n] = (Listed){(unsigned)slot->pid, (unsigned long long)slot->used, i};
      n++;
    }
  }
  for (int nth = 0; sim_line(d, "process", nth, args, sizeof args); nth++) {
    if (sscanf(args, "%u %lf", &pid, &mib) != 2 || !!strstr(args, "graphics") != graphics) continue;
    /* Less than 0: the driver does not tell the memory, as under Windows. */
    if (n < room) out[n] = (Listed){pid, mib < 0 ? ~0ull : (unsigned long long)mib * CUDASIM_MIB, d->index};
    n++;
  }
  return n;
}
#define PROCESSES(call, type, graphics, more)                                                  \
  API nvmlReturn_t call(nvmlDevice_t device, unsigned int *n, type *out) {                     \
    DEVICE;                                                                                    \
    Listed listed[256];                                                                        \
    unsigned found = list(d, graphics, listed, 256);                                           \
    if (!found) { *n = 0; return NVML_SUCCESS; }                                               \
    if (!out || *n < found) { *n = found; return NVML_ERROR_INSUFFICIENT_SIZE; }               \
    for (unsigned k = 0; k < found; k++) {                                                     \
      memset(&out[k], 0, sizeof out[k]);                                                       \
      out[k].pid = listed[k].pid;                                                              \
      out[k].usedGpuMemory = listed[k].used;                                                   \
      more;                                                                                    \
    }                                                                                          \
    *n = found;                                                                                \
    return NVML_SUCCESS;                                                                       \
  }
#define INSTANCES                                                                              \
  out[k].gpuInstanceId = d->kind == WHOLE ? NO_INSTANCE : (unsigned)listed[k].instance + 1;    \
  out[k].computeInstanceId = d->kind == WHOLE ? NO_INSTANCE : 0
PROCESSES(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, 0, (void)0)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, 0, INSTANCES)
#ifndef CUDASIM_OLD_DRIVER
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, 0, INSTANCES)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, 1, INSTANCES)
API nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *n, nvmlProcessInfo_t *out) { (void)out; DEVICE; *n = 0; return NVML_SUCCESS; }
#endif

/* ---- utilization of processes: one sample in a sixth of a second, of those that did something */
#define PERIOD_US 166000
static struct { int64_t at_us, busy_ns; unsigned pid, share; uint64_t stamp; } seen[CUDASIM_MAX_DEVICES][CUDASIM_SLOTS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int64_t wall_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1000000ll + t.tv_nsec / 1000;
}
static int64_t busy_ns(const cudasim_slot *s) {
  int64_t since = __atomic_load_n(&s->running_since, __ATOMIC_SEQ_CST), now = cudasim_now();
  return __atomic_load_n(&s->busy_ns, __ATOMIC_SEQ_CST) + (since > 0 && now > since ? now - since : 0);
}
/* Look at all slots of a device; the driver does it by itself, six times a second. */
static void observe(int i) {
  int64_t now = wall_us();
  for (int s = 0; s < CUDASIM_SLOTS; s++) {
    const cudasim_slot *slot = &sim_shared(i)->slot[s];
    unsigned pid = slot->pid > 0 ? (unsigned)slot->pid : 0;
    int64_t busy = pid ? busy_ns(slot) : 0;
    if (seen[i][s].pid == pid && now - seen[i][s].at_us < PERIOD_US) continue;
    double share = seen[i][s].pid == pid && seen[i][s].at_us ? (busy - seen[i][s].busy_ns) / 10.0 / (now - seen[i][s].at_us) : 0;
    seen[i][s].share = share < 0 ? 0 : share > 100 ? 100 : (unsigned)(share + 0.5);
    seen[i][s].pid = pid;
    seen[i][s].busy_ns = busy;
    seen[i][s].at_us = now;
    seen[i][s].stamp = (uint64_t)now;
  }
}
typedef struct { uint64_t stamp; unsigned pid, share; } Sample;
/* Steering: "sm PID SHARE [AGE_S]" adds a sample, also of a kind that no GPU should give. */
static unsigned samples(const Device *d, uint64_t since, Sample *out, unsigned room) {
  unsigned n = 0, pid, share;
  char args[160];
  double age = 0;
  pthread_mutex_lock(&mutex);
  cudasim_reap(sim_shared(d->index));
  observe(d->index);
  for (int s = 0; s < CUDASIM_SLOTS && n < room; s++)
    if (seen[d->index][s].pid && seen[d->index][s].share && seen[d->index][s].stamp > since)
      out[n++] = (Sample){seen[d->index][s].stamp, seen[d->index][s].pid, seen[d->index][s].share};
  pthread_mutex_unlock(&mutex);
  for (int nth = 0; n < room && sim_line(d, "sm", nth, args, sizeof args); nth++) {
    age = 0;
    if (sscanf(args, "%u %u %lf", &pid, &share, &age) < 2) continue;
    out[n++] = (Sample){(uint64_t)(wall_us() - (int64_t)(age * 1e6)), pid, share};
  }
  return n;
}
API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *out, unsigned int *n, unsigned long long since) {
  NOT_WITH_MIG;
  Sample found[128];
  unsigned count = samples(d, since, found, 128);
  if (!count) return NVML_ERROR_NOT_FOUND;
  if (!out || *n < count) { *n = count; return NVML_ERROR_INSUFFICIENT_SIZE; }
  for (unsigned k = 0; k < count; k++) {
    memset(&out[k], 0, sizeof out[k]);
    out[k].pid = found[k].pid;
    out[k].timeStamp = found[k].stamp;
    out[k].smUtil = found[k].share;
  }
  *n = count;
  return NVML_SUCCESS;
}
#ifndef CUDASIM_OLD_DRIVER
API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *p) {
  NOT_WITH_MIG;
  if (p->version != nvmlProcessesUtilizationInfo_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  Sample found[128];
  unsigned count = samples(d, p->lastSeenTimeStamp, found, 128);
  if (!count) return NVML_ERROR_NOT_FOUND;
  if (!p->procUtilArray || p->processSamplesCount < count) { p->processSamplesCount = count; return NVML_ERROR_INSUFFICIENT_SIZE; }
  for (unsigned k = 0; k < count; k++) {
    memset(&p->procUtilArray[k], 0, sizeof p->procUtilArray[k]);
    p->procUtilArray[k].pid = found[k].pid;
    p->procUtilArray[k].timeStamp = found[k].stamp;
    p->procUtilArray[k].smUtil = found[k].share;
  }
  p->processSamplesCount = count;
  return NVML_SUCCESS;
}
#endif
