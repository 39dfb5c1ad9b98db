/* What llama.cpp calls while it computes: the boundary tap, an eval callback that copies one named node of the
   compute graph and stops there, and the abort callback.

   Links against nothing and needs no Python headers. The four ggml functions are passed in; the caller finds them
   in the ggml library that llama-cpp-python ships. Loaded with ctypes; the mirror of `struct skippy_tap` is in
   tap.py, which checks its size before use.

   The scheduler asks before each node (ask = true: "do you need it?") and hands it over when it was computed
   (ask = false: "go on?"). Returning false then skips the rest of the split: the layers behind the tap. With
   several backends the later splits still run; they compute spare layers, which nobody reads. */

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

enum { TAP_OK = 0, TAP_NOT_F32 = 1, TAP_NOT_CONTIGUOUS = 2, TAP_NOT_ROWS = 3, TAP_OVERFLOW = 4 };

struct skippy_tap {
    const char *(*get_name)(const struct ggml_tensor *);
    size_t (*nbytes)(const struct ggml_tensor *);
    bool (*is_contiguous)(const struct ggml_tensor *);
    void (*tensor_get)(const struct ggml_tensor *, void *, size_t, size_t);
    char node[64];      /* the whole name: views and copies of it are called "<name> (view)" and so on */
    uint64_t row_bytes; /* bytes of one row, fixed */
    uint8_t *output;    /* set before each decode, with capacity; used and status are zeroed */
    uint64_t capacity;
    uint64_t used;      /* grows over the ubatches of one decode */
    int32_t status;     /* the first fault, kept */
    int32_t reserved;
};

EXPORT size_t skippy_tap_size(void) { return sizeof(struct skippy_tap); }

static int copy_rows(struct skippy_tap *tap, const struct ggml_tensor *tensor) {
    /* ggml has no accessor for the type; it is the first member of ggml_tensor, and 0 is F32 */
    int32_t type;
    memcpy(&type, tensor, sizeof type);
    if (type != 0) return TAP_NOT_F32;
    if (!tap->is_contiguous(tensor)) return TAP_NOT_CONTIGUOUS;
    uint64_t size = tap->nbytes(tensor);
    if (size % tap->row_bytes != 0) return TAP_NOT_ROWS;
    if (tap->output == NULL || size > tap->capacity - tap->used) return TAP_OVERFLOW;
    tap->tensor_get(tensor, tap->output + tap->used, 0, size);
    tap->used += size;
    return TAP_OK;
}

EXPORT bool skippy_tap_eval(struct ggml_tensor *tensor, bool ask, void *user_data) {
    struct skippy_tap *tap = user_data;
    if (ask) return strcmp(tap->get_name(tensor), tap->node) == 0;
    if (tap->status == TAP_OK) tap->status = copy_rows(tap, tensor);
    return false;
}

/* Asked before each node of the graph; another thread sets the flag. */
EXPORT bool skippy_aborts(void *user_data) { return *(const volatile int32_t *)user_data != 0; }
