/* Copies blocks of a pool to where they are packed, one after the other, or back: what staging/host.py calls. And gathers
 * and writes sub-chunk after sub-chunk, without the interpreter: what staging/compiled_runs.py calls.
 *
 * Scattered runs wait for memory. So the first cache lines of the next run are prefetched while one is copied. Long runs
 * are written into the pool by non-temporal stores, past the caches: the lines that they go to need not be read first, and
 * seldom does anybody read them soon. */

#define _POSIX_C_SOURCE 199309L

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LINE_BYTES = 64, LINES_AHEAD = 2, SHORTEST_STREAMED = 2048 };

typedef struct {
    int64_t count, stride;
} Loop;

typedef struct {
    const int64_t *starts;
    int64_t blocks;
    const Loop *loops; /* of a block, the slowest first */
    int64_t num_loops;
    int64_t length, offset; /* of a run; where the first block is packed */
} Group;

/* The loader compares this with the source that it was installed with. */
uint32_t kvferry_source_crc32(void) { return SOURCE_CRC32; }

static void prefetch(const char *run, size_t length) {
    for (size_t at = 0; at < length && at < LINES_AHEAD * LINE_BYTES; at += LINE_BYTES) __builtin_prefetch(run + at);
}

static void stream(char *to, const char *from, size_t length) {
#ifdef __SSE2__
    if (length >= SHORTEST_STREAMED && (uintptr_t)to % sizeof(__m128i) == 0) {
        for (; length >= LINE_BYTES; length -= LINE_BYTES, to += LINE_BYTES, from += LINE_BYTES) {
            const __m128i *words = (const __m128i *)from;
            const __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1);
            const __m128i c = _mm_loadu_si128(words + 2), d = _mm_loadu_si128(words + 3);
            _mm_stream_si128((__m128i *)to, a), _mm_stream_si128((__m128i *)to + 1, b);
            _mm_stream_si128((__m128i *)to + 2, c), _mm_stream_si128((__m128i *)to + 3, d);
        }
    }
#endif
    memcpy(to, from, length);
}

/* Returns where a block's runs of one round of its innermost loop begin. */
static char *place_of(int64_t start, const Loop *outer, int64_t loops, int64_t round) {
    char *place = (char *)(uintptr_t)start;
    while (loops--) {
        place += round % outer[loops].count * outer[loops].stride;
        round /= outer[loops].count;
    }
    return place;
}

/* Copies `count` blocks from the first on: to `packed` if `is_gather`, or else from there. */
static void copy_blocks(const Group *group, int64_t first, int64_t count, char *packed, bool is_gather) {
    const int64_t *starts = group->starts + first, blocks = count, num_loops = group->num_loops;
    const Loop *loops = group->loops;
    const size_t length = (size_t)group->length;
    const int64_t outer = num_loops > 0 ? num_loops - 1 : 0;
    const Loop inner = num_loops > 0 ? loops[outer] : (Loop){1, 0};
    int64_t rounds = 1;
    for (int64_t loop = 0; loop < outer; ++loop) rounds *= loops[loop].count;
    for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t round = 0; round < rounds; ++round) {
            char *run = place_of(starts[block], loops, outer, round);
            const char *following = run;
            if (round + 1 < rounds)
                following = place_of(starts[block], loops, outer, round + 1);
            else if (block + 1 < blocks)
                following = (const char *)(uintptr_t)starts[block + 1];
            for (int64_t left = inner.count; left > 0; --left, run += inner.stride, packed += length) {
                prefetch(left > 1 ? run + inner.stride : following, length);
                if (is_gather)
                    memcpy(packed, run, length);
                else
                    stream(run, packed, length);
            }
        }
    }
#ifdef __SSE2__
    _mm_sfence(); /* whoever is told of the end sees what was streamed */
#endif
}

/* Copies all blocks of some groups, which are packed from `packed` on. */
void kvferry_copy(const Group *groups, int64_t count, char *packed, int is_gather) {
    for (const Group *group = groups; group < groups + count; ++group)
        copy_blocks(group, 0, group->blocks, packed + group->offset, is_gather);
}

/* ---- Sub-chunks, gathered and written in bulk ------------------------------------------------------------------------
 *
 * Where a post copies all bytes itself, as between processes of one machine, a sub-chunk goes slice by slice through a
 * few pages that stay in the processor's cache. Once a slice is on its way after its post, the rest goes in one piece. */

/* The handle of a request of NIXL's C interface lies in front. */
typedef struct {
    void *handle;
} Request;

/* NIXL's C interface, or a test's: 0 is success, 1 that it is on its way, less an error. */
typedef struct {
    int (*create_options)(void **options);
    int (*destroy_options)(void *options);
    int (*set_has_notification)(void *options, bool has);
    int (*set_notification)(void *options, const void *bytes, size_t length);
    int (*create_list)(int memory, void **list);
    int (*add)(void *list, uintptr_t address, size_t length, uint64_t device);
    int (*destroy_list)(void *list);
    int (*create)(void *agent, int operation, void *ours, void *theirs, const char *peer, Request **made, void *options);
    int (*destroy)(Request *request);
    int (*post)(void *agent, Request *request, void *options);
    int (*status)(void *agent, Request *request);
    int (*release)(void *agent, Request *request);
} Calls;

typedef struct {
    const Calls *calls;
    void *agent;
    const char *peer;
    int64_t memory, our_device, their_device;
    pthread_mutex_t *progress; /* held by whoever makes progress; NULL if nobody else does */
} Wire;

enum { WRITE = 1, NOT_MADE = 1, HALF_POSTED = 2 };

typedef struct {
    const Group *groups;
    int64_t num_groups;
    char *packed; /* staging memory for all of it */
    int64_t length;
    uint64_t to;
    const char *notification;
    int64_t notification_length;
    /* What came of it. Handles are of requests that have not ended, at most two; the caller releases them. */
    void *handles[2];
    int64_t num_handles, ended, ended_bytes, is_notified, problem;
    double begun_at, posted_at, posting_s;
} Step;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int64_t block_bytes(const Group *group) {
    int64_t bytes = group->length;
    for (int64_t loop = 0; loop < group->num_loops; ++loop) bytes *= group->loops[loop].count;
    return bytes;
}

static Request *make_request(const Wire *wire, void *options, const char *from, uint64_t to, int64_t length) {
    const Calls *calls = wire->calls;
    Request *request = NULL;
    void *ours = NULL, *theirs = NULL;
    if (calls->create_list((int)wire->memory, &ours) || calls->create_list((int)wire->memory, &theirs) ||
        calls->add(ours, (uintptr_t)from, (size_t)length, (uint64_t)wire->our_device) ||
        calls->add(theirs, to, (size_t)length, (uint64_t)wire->their_device) ||
        calls->create(wire->agent, WRITE, ours, theirs, wire->peer, &request, options))
        request = NULL;
    if (ours) calls->destroy_list(ours);
    if (theirs) calls->destroy_list(theirs);
    return request;
}

/* Where the part of a step is packed that begins at `at`: in front, as long as all before it has ended. */
static char *part_of(const Step *step, int64_t at) { return step->packed + (step->num_handles ? at : 0); }

/* Writes a part of a step. Returns whether the next may be written. */
static bool write_part(const Wire *wire, void *options, Step *step, int64_t at, int64_t length) {
    const Calls *calls = wire->calls;
    const double begun_at = now();
    calls->set_has_notification(options, false);
    Request *request = make_request(wire, options, part_of(step, at), step->to + (uint64_t)at, length);
    if (!request) {
        step->problem = NOT_MADE;
        return false;
    }
    /* A write may pass those before it: who is to be told waits for all of them. */
    if (at + length == step->length && !step->num_handles) {
        calls->set_has_notification(options, true);
        calls->set_notification(options, step->notification, (size_t)step->notification_length);
        step->is_notified = 1;
    }
    if (wire->progress) pthread_mutex_lock(wire->progress);
    int status = calls->post(wire->agent, request, options);
    if (status < 0) step->problem = HALF_POSTED;
    if (status > 0 && calls->status(wire->agent, request) == 0) status = 0; /* who asks next meets an error again */
    if (wire->progress) pthread_mutex_unlock(wire->progress);
    step->posted_at = now();
    step->posting_s += step->posted_at - begun_at;
    if (status) {
        step->handles[step->num_handles++] = request->handle;
        request->handle = NULL; /* else it is not destroyed */
    } else {
        calls->release(wire->agent, request);
        ++step->ended, step->ended_bytes += length;
    }
    calls->destroy(request);
    return status >= 0;
}

static bool run_step(const Wire *wire, void *options, Step *step, int64_t slice_bytes) {
    int64_t at = 0; /* where the part begins that is being gathered */
    step->begun_at = now();
    for (int64_t each = 0; each < step->num_groups; ++each) {
        const Group *group = &step->groups[each];
        const int64_t bytes = block_bytes(group);
        int64_t count = 0;
        for (int64_t first = 0; first < group->blocks; first += count) {
            const int64_t begin = group->offset + first * bytes;
            const int64_t fitting = step->num_handles ? group->blocks : (slice_bytes - (begin - at)) / bytes;
            if (fitting < 1 && begin > at) {
                if (!write_part(wire, options, step, at, begin - at)) return false;
                at = begin, count = 0;
                continue;
            }
            count = group->blocks - first;
            if (count > fitting) count = fitting < 1 ? 1 : fitting;
            copy_blocks(group, first, count, part_of(step, at) + (begin - at), true);
        }
    }
    return write_part(wire, options, step, at, step->length - at);
}

/* Runs steps until one fails, or `comings` is no longer 0. Returns how many were begun. */
int64_t kvferry_run(const Wire *wire, Step *steps, int64_t count, int64_t slice_bytes, const volatile int64_t *comings) {
    void *options = NULL;
    int64_t begun = 0;
    if (wire->calls->create_options(&options)) return 0;
    while (begun < count && (!begun || !*comings)) {
        Step *step = &steps[begun++];
        if (!run_step(wire, options, step, slice_bytes)) break;
        /* What is on its way gets on when somebody asks. */
        if (begun > 1 && steps[begun - 2].num_handles) {
            if (wire->progress) pthread_mutex_lock(wire->progress);
            wire->calls->status(wire->agent, (Request *)&steps[begun - 2].handles[steps[begun - 2].num_handles - 1]);
            if (wire->progress) pthread_mutex_unlock(wire->progress);
        }
    }
    wire->calls->destroy_options(options);
    return begun;
}
