/* Gathers, posts and polls sub-chunk after sub-chunk, without the interpreter: what benchmarks/native_loop.py times.
 *
 * It knows NIXL only by the functions that it is given, of libnixl_capi.so or of a test. */

#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {
    int (*post)(void *agent, void *request, void *options);
    int (*status)(void *agent, void *request);
    int (*set_notification)(void *options, const void *bytes, size_t length);
    void *agent, *options;
} Calls;

/* Returns how often it looked for an end, -1 if it was cancelled, or less than that: what NIXL has answered. */
int64_t move(const Calls *calls, const uint64_t *requests, const uint64_t *slots, int64_t in_flight,
             const uint64_t *starts, int64_t sub_chunks, int64_t runs, uint64_t run_bytes, const uint8_t *notifications,
             int64_t notification_bytes, const volatile int64_t *is_cancelled) {
    const struct timespec pause = {0, 20000};
    int64_t looks = 0;
    for (int64_t number = 0; number < sub_chunks + in_flight; ++number) {
        void *request = (void *)requests[number % in_flight];
        if (number >= in_flight) {
            int status;
            while (++looks, (status = calls->status(calls->agent, request)) > 0) nanosleep(&pause, 0);
            if (status < 0) return status - 1;
        }
        if (number >= sub_chunks) continue;
        if (*is_cancelled) return -1;
        char *packed = (char *)slots[number % in_flight];
        for (int64_t run = 0; run < runs; ++run, packed += run_bytes)
            memcpy(packed, (const void *)starts[number * runs + run], run_bytes);
        calls->set_notification(calls->options, notifications + number * notification_bytes, notification_bytes);
        int status = calls->post(calls->agent, request, calls->options);
        if (status < 0) return status - 1;
    }
    return looks;
}
