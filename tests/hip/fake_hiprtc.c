/* hiprtc for tests: checks what it is given and fails where FAKE_HIPRTC says so. A program's code is "ELF " and its options. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct program { char name[64], code[2000], log[200]; int headers, warp; };
static int alive;

static int fails(const char *what) {
  const char *fail = getenv("FAKE_HIPRTC");
  return fail && !strcmp(fail, what);
}
const char *hiprtcGetErrorString(int code) { return code == 6 ? "HIPRTC_ERROR_COMPILATION" : code ? "HIPRTC_ERROR_INVALID_INPUT" : "HIPRTC_SUCCESS"; }
int hiprtcVersion(int *major, int *minor) {
  *major = 9;
  *minor = 0;
  return fails("version") ? 3 : 0;
}
int hiprtcCreateProgram(void **out, const char *text, const char *name, int headers, const char **texts, const char **names) {
  if (!text || !name || headers <= 0 || fails("create")) return 3;
  struct program *p = calloc(1, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", name);
  p->headers = headers;
  for (int i = 0; i < headers; ++i) {
    if (!texts[i] || !names[i] || !strlen(texts[i])) return 3;
    if (!strcmp(names[i], "warp.h")) p->warp = strstr(texts[i], "__GFX9__") == NULL && strstr(texts[i], "kWaveLanes") != NULL;
  }
  ++alive;
  *out = p;
  return 0;
}
int hiprtcCompileProgram(void *handle, int options, const char **values) {
  struct program *p = handle;
  int arch = 0;
  strcat(p->code, "ELF");
  for (int i = 0; i < options; ++i) {
    arch += !strncmp(values[i], "--offload-arch=gfx", 18) && !strchr(values[i], ':');
    strcat(strcat(p->code, " "), values[i]);
  }
  snprintf(p->log, sizeof p->log, "%s:1: error: as asked", p->name);
  return fails("compile") || arch != 1 || !p->warp ? 6 : 0;
}
int hiprtcGetProgramLogSize(void *p, size_t *n) { return *n = strlen(((struct program *)p)->log) + 1, 0; }
int hiprtcGetProgramLog(void *p, char *to) { return strcpy(to, ((struct program *)p)->log), 0; }
int hiprtcGetCodeSize(void *p, size_t *n) { return *n = strlen(((struct program *)p)->code), fails("size") ? 3 : 0; }
int hiprtcGetCode(void *p, char *to) { return memcpy(to, ((struct program *)p)->code, strlen(((struct program *)p)->code)), fails("code") ? 3 : 0; }
int hiprtcDestroyProgram(void **p) { return free(*p), --alive, 0; }
int fake_alive(void) { return alive; }
