/* A cuDNN of three plans, with just enough of its graph API to be asked.
 *
 * The heuristics offer engine 1, which rounds its inputs, engine 2, which no plan can be made of, and
 * engine 3. The workspace of a plan is a thousand times its engine, and the alignment of the tensors;
 * a knob 25 of 1 takes away one. Engine 3 multiplies with cuBLASLt if the type is bfloat16.
 *
 * In half precision engine 2 would be compiled at run time, if the driver is there: it needs no plan. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ENGINE = 2, CONFIG = 3, PLAN = 5, KNOB = 7 };
typedef struct {
    int kind, engine, mode;
    int64_t name, value, alignment;
} Descriptor;

static int64_t alignment;
static int is_half, is_product;

static int has_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*launch)(void) = driver ? (int (*)(void))dlsym(driver, "cuLaunchKernelEx") : 0;
    return launch && launch() == 100;
}

static void ask_cublaslt(void) {
    void *library = dlopen("libcublasLt.so.13", RTLD_NOW);
    int (*set)() = library ? (int (*)())dlsym(library, "cublasLtMatmulPreferenceSetAttribute") : 0;
    size_t most = 4 << 20;
    if (set) set((void *)0, 1, &most, sizeof most);
}

size_t cudnnGetVersion(void) { return 91900; }

int cudnnBackendCreateDescriptor(int kind, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    (*made)->kind = kind;
    return 0;
}

int cudnnBackendDestroyDescriptor(Descriptor *one) {
    free(one);
    return 0;
}

int cudnnBackendFinalize(Descriptor *one) {
    if (one->kind == ENGINE && one->engine == 3 && is_product) ask_cublaslt();
    return one->kind == PLAN && one->engine == 2 ? 3000 : 0;
}

int cudnnBackendSetAttribute(Descriptor *one, int name, int kind, int64_t count, const void *values) {
    (void)kind, (void)count;
    const Descriptor *const *others = values;
    if (name == 900) alignment = *(const int64_t *)values;
    if (name == 901) is_half = *(const int *)values == 2, is_product = *(const int *)values == 9;
    if (name == 1301) one->engine = (int)*(const int64_t *)values;
    if (name == 300 || name == 401) one->engine = others[0]->engine, one->value = others[0]->value;
    if (name == 600) one->name = *(const int *)values;
    if (name == 601) one->value = *(const int64_t *)values;
    if (name == 302) one->value = others[0]->value;
    if (name == 200) one->mode = *(const int *)values;
    return 0;
}

int cudnnBackendGetAttribute(Descriptor *one, int name, int kind, int64_t most, int64_t *count, void *values) {
    (void)kind;
    Descriptor **others = values;
    *count = 1;
    if (name == 202) {
        *count = one->mode == 0 ? 3 : 0;
        for (int64_t at = 0; at < most && at < *count; at++) others[at]->engine = (int)at + 1;
    } else if (name == 300) {
        others[0]->engine = one->engine;
    } else if (name == 1301) {
        *(int64_t *)values = one->engine;
    } else if (name == 1303) {
        *(int *)values = one->engine == 1 ? 1 : 0;
    } else if (name == 1305) {
        *count = is_half && one->engine == 2 && has_driver();
        *(int *)values = 0;
    } else if (name == 302) {
        *count = 2;
        others[0]->name = 25, others[0]->value = one->value;
        others[1]->name = 28, others[1]->value = 1;
    } else if (name == 600) {
        *(int *)values = (int)one->name;
    } else if (name == 601) {
        *(int64_t *)values = one->value;
    } else if (name == 303 || name == 402) {
        *(int64_t *)values = 1000 * one->engine + alignment - one->value;
    }
    return 0;
}
