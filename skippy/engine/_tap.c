/* What llama.cpp calls while it computes: the boundary tap, an eval callback that overwrites and copies named
   nodes of the compute graph and stops behind the last one, and the abort callback.

   Links against nothing and needs no Python headers. The five ggml functions are passed in; the caller finds them
   in the ggml library that llama-cpp-python ships. Loaded with ctypes; the mirror of `struct skippy_tap` is in
   tap.py, which checks its size before use.

   The scheduler asks before each node (ask = true: "do you need it?") and hands it over when it was computed
   (ask = false: "go on?"). What is then written to the node is what the nodes behind it read. Returning false
   skips the rest of the split: the layers behind the tap. With several backends the later splits still run; they
   compute spare layers, which nobody reads. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

struct ggml_tensor;

enum { MAX_POINTS = 64 };
enum { TAP_OK = 0, TAP_NOT_F32 = 1, TAP_NOT_CONTIGUOUS = 2, TAP_NOT_ROWS = 3, TAP_OVERFLOW = 4, TAP_NO_INPUT = 5 };

struct skippy_point {
    char node[64];      /* the whole name: views and copies of it are called "<name> (view)" and so on */
    uint64_t row_bytes; /* bytes of one row, fixed */
    uint8_t *data;      /* set before each decode, with capacity; used is zeroed */
    uint64_t capacity;
    uint64_t used;      /* grows over the ubatches of one decode */
    int32_t writes;     /* the node is overwritten from data; else it is copied to data */
    int32_t status;     /* the first fault, kept */
};

struct skippy_tap {
    const char *(*get_name)(const struct ggml_tensor *);
    size_t (*nbytes)(const struct ggml_tensor *);
    bool (*is_contiguous)(const struct ggml_tensor *);
    void (*tensor_get)(const struct ggml_tensor *, void *, size_t, size_t);
    void (*tensor_set)(struct ggml_tensor *, const void *, size_t, size_t);
    int32_t count;
    int32_t last; /* the point behind which the graph stops; -1: it goes on to its end */
    struct skippy_point points[MAX_POINTS]; /* in the order in which they act on a node that several name */
};

EXPORT size_t skippy_tap_size(void) { return sizeof(struct skippy_tap); }

static int move_rows(struct skippy_tap *tap, struct skippy_point *point, struct ggml_tensor *tensor) {
    /* ggml has no accessor for the type; it is the first member of ggml_tensor, and 0 is F32 */
    int32_t type;
    memcpy(&type, tensor, sizeof type);
    if (type != 0) return TAP_NOT_F32;
    if (!tap->is_contiguous(tensor)) return TAP_NOT_CONTIGUOUS;
    uint64_t size = tap->nbytes(tensor);
    if (size % point->row_bytes != 0) return TAP_NOT_ROWS;
    if (point->data == NULL || size > point->capacity - point->used)
        return point->writes ? TAP_NO_INPUT : TAP_OVERFLOW;
    if (point->writes)
        tap->tensor_set(tensor, point->data + point->used, 0, size);
    else
        tap->tensor_get(tensor, point->data + point->used, 0, size);
    point->used += size;
    return TAP_OK;
}

EXPORT bool skippy_tap_eval(struct ggml_tensor *tensor, bool ask, void *user_data) {
    struct skippy_tap *tap = user_data;
    const char *name = tap->get_name(tensor);
    bool wanted = false, stop = false;
    for (int32_t i = 0; i < tap->count; i++) {
        struct skippy_point *point = &tap->points[i];
        if (strcmp(name, point->node) != 0) continue;
        if (ask) return true;
        wanted = true;
        if (point->status == TAP_OK) point->status = move_rows(tap, point, tensor);
        if (i == tap->last || point->status != TAP_OK) stop = true;
    }
    return wanted && !stop;
}

/* Asked before each node of the graph; another thread sets the flag. */
EXPORT bool skippy_aborts(void *user_data) { return *(const volatile int32_t *)user_data != 0; }
