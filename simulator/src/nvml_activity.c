/* Utilization, power, clocks, heat, throttling, PCIe and GPM.
 *
 * Utilization is the share of time in which a stream of any process had work; power follows it, and
 * the energy counter is its exact integral. PCIe counts the bytes that copies moved. The shares of
 * GPM are fixed parts of the utilization between its two samples. The rest is constant and plausible
 * for an H100, or what the steering says.
 */
#include "nvml_sim.h"

#define IDLE_W 72.0
#define PEAK_W 560.0
#define LIMIT_MW 700000u
#define SLOWDOWN_C 92

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct { double at, busy; int percent; } window[CUDASIM_MAX_DEVICES];

double sim_now_s(void) { return cudasim_now() * 1e-9; }

/* Over the last sixth of a second, as the driver does it. */
static int percent_busy(int i) {
  pthread_mutex_lock(&mutex);
  if (window[i].at == 0) {
    window[i].at = sim_now_s();
    window[i].busy = cudasim_busy_s(sim_shared(i));
    struct timespec t = {0, 20000000};
    nanosleep(&t, 0);
    window[i].at -= 0.15; /* so that this first look counts at once */
    double share = (cudasim_busy_s(sim_shared(i)) - window[i].busy) / 0.02;
    window[i].percent = share > 1 ? 100 : (int)(share * 100 + 0.5);
  }
  double t = sim_now_s(), elapsed = t - window[i].at;
  if (elapsed >= 0.166) {
    double busy = cudasim_busy_s(sim_shared(i)), share = (busy - window[i].busy) / elapsed;
    window[i].percent = share < 0 ? 0 : share > 1 ? 100 : (int)(share * 100 + 0.5);
    window[i].at = t;
    window[i].busy = busy;
  }
  int found = window[i].percent;
  pthread_mutex_unlock(&mutex);
  return found;
}
int sim_busy_percent(const Device *d) {
  int first, end, sum = 0;
  sim_range(d, &first, &end);
  for (int i = first; i < end; i++) sum += percent_busy(i);
  return end > first ? sum / (end - first) : 0;
}
static double busy_s(const Device *d) {
  int first, end;
  double sum = 0;
  sim_range(d, &first, &end);
  for (int i = first; i < end; i++) sum += cudasim_busy_s(sim_shared(i));
  return end > first ? sum / (end - first) : 0;
}
static double watts(const Device *d) { return IDLE_W + (PEAK_W - IDLE_W) * sim_busy_percent(d) / 100.0; }
static double joules(const Device *d) {
  double seconds = (cudasim_now() - sim_shared(d->index)->begun_ns) * 1e-9;
  return IDLE_W * seconds + (PEAK_W - IDLE_W) * busy_s(d);
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *u) {
  NOT_WITH_MIG;
  u->gpu = (unsigned)sim_busy_percent(d);
  u->memory = u->gpu * 2 / 5;
  return NVML_SUCCESS;
}
NUMBER(nvmlDeviceGetPowerUsage, watts(d) * 1e3)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, sim_number(d, "power_limit", LIMIT_MW / 1e3) * 1e3)
NUMBER(nvmlDeviceGetPowerManagementLimit, sim_number(d, "power_limit", LIMIT_MW / 1e3) * 1e3)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, LIMIT_MW)
API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *out) { GPU_ONLY; *out = (unsigned long long)(joules(d) * 1e3); return NVML_SUCCESS; }

/* ---- heat and clocks */
static double celsius(const Device *d) { return sim_number(d, "temperature", 34 + 26.0 * sim_busy_percent(d) / 100); }
API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t s, unsigned int *out) { GPU_ONLY; if (s != 0) return NVML_ERROR_INVALID_ARGUMENT; *out = (unsigned)celsius(d); return NVML_SUCCESS; }
#ifndef CUDASIM_OLD_DRIVER
API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *t) { GPU_ONLY; if (t->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH; t->temperature = (int)celsius(d); return NVML_SUCCESS; }
API nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *t) { GPU_ONLY; if (t->version != nvmlMarginTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH; t->marginTemperature = SLOWDOWN_C - (int)celsius(d); return NVML_SUCCESS; }
#endif
API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t t, unsigned int *out) { GPU_ONLY; *out = t == 0 ? 95 : t == 1 ? SLOWDOWN_C : 87; return NVML_SUCCESS; }
API nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *out) {
  GPU_ONLY;
  double speed = sim_number(d, "fan", -1); /* an SXM board has none */
  if (speed < 0) return NVML_ERROR_NOT_SUPPORTED;
  *out = (unsigned)speed;
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t t, unsigned int *out) { GPU_ONLY; *out = t == NVML_CLOCK_MEM ? 2619 : sim_busy_percent(d) ? 1980 : 345; return NVML_SUCCESS; }
API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t t, unsigned int *out) { GPU_ONLY; *out = t == NVML_CLOCK_MEM ? 2619 : 1980; return NVML_SUCCESS; }
API nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *out) { GPU_ONLY; *out = NVML_PSTATE_0; return NVML_SUCCESS; }

/* ---- throttling: "throttle MASK" holds from the time that the steering was written */
static unsigned long long mask(const Device *d) {
  char args[64];
  if (sim_line(d, "throttle", 0, args, sizeof args)) return strtoull(args, 0, 0);
  return sim_busy_percent(d) ? 0 : nvmlClocksEventReasonGpuIdle;
}
#ifndef CUDASIM_OLD_DRIVER
API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *out) { GPU_ONLY; *out = mask(d); return NVML_SUCCESS; }
#endif
API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *out) { GPU_ONLY; *out = mask(d); return NVML_SUCCESS; }
static unsigned long long throttled_ns(const Device *d, unsigned long long bit) {
  char args[64];
  int steered = sim_line(d, "throttle", 0, args, sizeof args);
  return steered && (strtoull(args, 0, 0) & bit) ? (unsigned long long)(sim_age_s() * 1e9) : 0;
}

/* ---- PCIe: all copies of all processes; "pcie_bits 32" lets the counters wrap */
static int64_t copied(const Device *d, int up) {
  int first, end;
  int64_t sum = 0;
  sim_range(d, &first, &end);
  for (int i = first; i < end; i++) {
    cudasim_device *shared = sim_shared(i);
    sum += up ? shared->dead_h2d : shared->dead_d2h;
    for (int s = 0; s < CUDASIM_SLOTS; s++)
      if (shared->slot[s].pid > 0) sum += up ? shared->slot[s].h2d_bytes : shared->slot[s].d2h_bytes;
  }
  sum += (int64_t)sim_number(d, "pcie_bytes", 0);
  return sim_number(d, "pcie_bits", 64) < 64 ? sum & 0xFFFFFFFF : sum;
}
API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t c, unsigned int *out) {
  GPU_ONLY;
  struct timespec t = {0, 20000000}; /* it measures as long as this */
  int64_t before = copied(d, c == NVML_PCIE_UTIL_RX_BYTES);
  nanosleep(&t, 0);
  *out = (unsigned)((copied(d, c == NVML_PCIE_UTIL_RX_BYTES) - before) / 20); /* KB/s */
  return NVML_SUCCESS;
}

/* ---- field values */
static nvmlReturn_t field(const Device *d, nvmlFieldValue_t *f) {
  char args[64];
  int code, id, major = 580;
  if (sim_line(0, "driver", 0, args, sizeof args)) major = atoi(args);
  for (int nth = 0; sim_line(d, "field", nth, args, sizeof args); nth++)
    if (sscanf(args, "%d %d", &id, &code) == 2 && id == (int)f->fieldId) return (nvmlReturn_t)code;
  f->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
  id = (int)f->fieldId;
  if (major < 580 && id >= 251) id = major >= 575 && id <= 253 ? id + 18 : major >= 575 && id == 269 ? -269 : 0; /* renumbered */
  switch (id) {
    case NVML_FI_DEV_POWER_INSTANT: case NVML_FI_DEV_POWER_AVERAGE:
      f->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
      f->value.uiVal = (unsigned)(watts(d) * 1e3);
      return NVML_SUCCESS;
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: f->value.ullVal = (unsigned long long)(joules(d) * 1e3); return NVML_SUCCESS;
    case NVML_FI_DEV_MEMORY_TEMP:
      f->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
      f->value.uiVal = (unsigned)celsius(d) + 6;
      return NVML_SUCCESS;
    case NVML_FI_DEV_PERF_POLICY_POWER: f->value.ullVal = throttled_ns(d, 0x4); return NVML_SUCCESS;
    case 269: f->value.ullVal = throttled_ns(d, 0x20); return NVML_SUCCESS;
    case 270: f->value.ullVal = throttled_ns(d, 0x40); return NVML_SUCCESS;
    case 271: f->value.ullVal = throttled_ns(d, 0x80); return NVML_SUCCESS;
    case -269: f->value.ullVal = 12345; return NVML_SUCCESS; /* something else in R575 */
    case NVML_FI_DEV_PCIE_COUNT_TX_BYTES: f->value.ullVal = (unsigned long long)copied(d, 0); return NVML_SUCCESS;
    case NVML_FI_DEV_PCIE_COUNT_RX_BYTES: f->value.ullVal = (unsigned long long)copied(d, 1); return NVML_SUCCESS;
    case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX:
      if (!sim_line(d, "nvlink_kib_s", 0, args, sizeof args)) return NVML_ERROR_NOT_SUPPORTED;
      f->value.ullVal = (unsigned long long)(atof(args) * sim_now_s());
      return NVML_SUCCESS;
    case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
      f->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
      f->value.uiVal = (unsigned)sim_number(d, "recovery", 0);
      return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_SUPPORTED;
}
API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int n, nvmlFieldValue_t *f) {
  GPU_ONLY;
  for (int k = 0; k < n; k++) {
    f[k].latencyUsec = 1;
    f[k].timestamp = (long long)time(0) * 1000000;
    f[k].value.ullVal = 0;
    f[k].nvmlReturn = field(d, &f[k]);
  }
  return NVML_SUCCESS;
}

/* ---- GPM */
struct nvmlGpmSample_st { double at, busy; int64_t up, down; };

#ifndef CUDASIM_OLD_DRIVER
API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *s) { GPU_ONLY; s->isSupportedDevice = cudasim_number("CUDASIM_CC", 90) >= 90; return NVML_SUCCESS; }
API nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *out) { READY; *out = calloc(1, sizeof **out); return NVML_SUCCESS; }
API nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) { READY; free(sample); return NVML_SUCCESS; }
static void sample(const Device *d, nvmlGpmSample_t out) { *out = (struct nvmlGpmSample_st){sim_now_s(), busy_s(d), copied(d, 1), copied(d, 0)}; }
API nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t out) { GPU_ONLY; sample(d, out); return NVML_SUCCESS; }
API nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int instance, nvmlGpmSample_t out) {
  GPU_ONLY;
  if (d->kind != PARENT || !instance || (int)instance > cudasim_count()) return NVML_ERROR_INVALID_ARGUMENT;
  Device one = {(int)instance - 1, INSTANCE};
  sample(&one, out);
  return NVML_SUCCESS;
}
API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *g) {
  READY;
  if (g->version != NVML_GPM_METRICS_GET_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  double seconds = g->sample2->at - g->sample1->at;
  if (seconds < 0.1) return NVML_ERROR_INVALID_ARGUMENT;
  double busy = 100 * (g->sample2->busy - g->sample1->busy) / seconds;
  if (busy > 100) busy = 100;
  for (unsigned k = 0; k < g->numMetrics; k++) {
    nvmlGpmMetric_t *m = &g->metrics[k];
    m->nvmlReturn = NVML_SUCCESS;
    switch (m->metricId) {
      case NVML_GPM_METRIC_GRAPHICS_UTIL: m->value = busy; break;
      case NVML_GPM_METRIC_SM_UTIL: m->value = 0.8 * busy; break;
      case NVML_GPM_METRIC_SM_OCCUPANCY: m->value = 0.4 * busy; break;
      case NVML_GPM_METRIC_ANY_TENSOR_UTIL: m->value = sim_number(0, "gpm_nan", 0) ? 0.0 / 0.0 : 0.3 * busy; break;
      case NVML_GPM_METRIC_DRAM_BW_UTIL: m->value = 0.2 * busy; break;
      case NVML_GPM_METRIC_PCIE_TX_PER_SEC: m->value = (double)(g->sample2->down - g->sample1->down) / seconds / CUDASIM_MIB; break;
      case NVML_GPM_METRIC_PCIE_RX_PER_SEC: m->value = (double)(g->sample2->up - g->sample1->up) / seconds / CUDASIM_MIB; break;
      default: m->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
  }
  return NVML_SUCCESS;
}
#endif

/* Not here; torch looks these up by name. */
API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *out) { (void)link; (void)out; DEVICE; return NVML_ERROR_NOT_SUPPORTED; }
API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *out) { (void)link; (void)out; DEVICE; return NVML_ERROR_NOT_SUPPORTED; }
API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *out) { (void)link; (void)out; DEVICE; return NVML_ERROR_NOT_SUPPORTED; }
