/* What a test says of the GPUs, and how often each call was made.
 *
 * CUDASIM_NVML holds statements, separated by ';', or the path of a file with one a line, which is
 * read again when it changes. README.md lists them. "@1 fan 40" concerns the second GPU alone.
 */
#include "nvml_sim.h"

#define LINES 256
#define WIDTH 160
#define CALLS 256

static struct { int gpu; char word[32]; char args[WIDTH]; } lines[LINES];
static int line_count, loaded;
static struct timespec read_at;
static int64_t read_size;
static struct { const char *name; long n; } calls[CALLS];
static int call_count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void add(char *text) {
  int gpu = -1, at = 0;
  while (*text == ' ') text++;
  if (*text == '@') {
    gpu = atoi(text + 1);
    text += strcspn(text, " ");
  }
  if (line_count == LINES || sscanf(text, " %31s %n", lines[line_count].word, &at) < 1) return;
  lines[line_count].gpu = gpu;
  snprintf(lines[line_count].args, WIDTH, "%s", text + at);
  line_count++;
}

static void split(char *text) {
  line_count = 0;
  for (char *rest = text, *one; (one = strsep(&rest, ";\n"));) add(one);
}

/* Read the steering if it is new. The mutex is held. */
static void load(void) {
  const char *name = getenv("CUDASIM_NVML");
  if (!name || !*name) return;
  if (*name != '/') {
    if (loaded) return;
    char *copy = strdup(name);
    split(copy);
    free(copy);
    loaded = 1;
    return;
  }
  struct stat s;
  if (stat(name, &s)) return;
  if (loaded && s.st_mtim.tv_sec == read_at.tv_sec && s.st_mtim.tv_nsec == read_at.tv_nsec && s.st_size == read_size) return;
  FILE *f = fopen(name, "r");
  if (!f) return;
  static char text[LINES * WIDTH];
  text[fread(text, 1, sizeof text - 1, f)] = 0;
  fclose(f);
  split(text);
  read_at = s.st_mtim;
  read_size = s.st_size;
  loaded = 1;
}

static int concerns(int line, const Device *d) {
  int first = 0, end = 1;
  if (lines[line].gpu < 0) return 1;
  if (d) sim_range(d, &first, &end);
  return d && lines[line].gpu >= first && lines[line].gpu < end;
}

int sim_line(const Device *d, const char *word, int nth, char *args, size_t size) {
  int found = 0;
  pthread_mutex_lock(&mutex);
  load();
  for (int k = 0; k < line_count && !found; k++)
    if (lines[k].word[0] == word[0])
    if (!strcmp(lines[k].word, word) && concerns(k, d) && nth-- == 0) {
      snprintf(args, size, "%s", lines[k].args);
      found = 1;
    }
  pthread_mutex_unlock(&mutex);
  return found;
}

double sim_number(const Device *d, const char *word, double otherwise) {
  char args[WIDTH];
  return sim_line(d, word, 0, args, sizeof args) ? atof(args) : otherwise;
}

double sim_age_s(void) {
  struct timespec now;
  if (!read_at.tv_sec) return 0;
  clock_gettime(CLOCK_REALTIME, &now);
  return (now.tv_sec - read_at.tv_sec) + (now.tv_nsec - read_at.tv_nsec) * 1e-9;
}

static void count(const char *name) {
  int k = 0;
  while (k < call_count && calls[k].name != name) k++; /* each function's __func__ is one string */
  if (k == CALLS) return;
  if (k == call_count) calls[call_count++].name = name;
  calls[k].n++;
}

nvmlReturn_t sim_call(const char *name, const Device *d) {
  char args[WIDTH], function[64];
  int code;
  pthread_mutex_lock(&mutex);
  count(name);
  pthread_mutex_unlock(&mutex);
  for (int nth = 0; sim_line(d, "refuse", nth, args, sizeof args); nth++) {
    if (sscanf(args, "%63s %d", function, &code) != 2) continue;
    char *star = strchr(function, '*');
    if (star ? !strncmp(function, name, (size_t)(star - function)) : !strcmp(function, name)) return (nvmlReturn_t)code;
  }
  return NVML_SUCCESS;
}

/* Calls so far by name, as JSON; for tests. */
API const char *cudasim_nvml_counts(void) {
  static char text[CALLS * 80];
  size_t at = 0;
  pthread_mutex_lock(&mutex);
  at += (size_t)snprintf(text, sizeof text, "{");
  for (int k = 0; k < call_count; k++)
    at += (size_t)snprintf(text + at, sizeof text - at, "%s\"%s\": %ld", k ? ", " : "", calls[k].name, calls[k].n);
  snprintf(text + at, sizeof text - at, "}");
  pthread_mutex_unlock(&mutex);
  return text;
}
