/* Copies blocks of a pool to where they are packed, one after the other, or back: what staging/host.py calls.
 *
 * Scattered runs wait for memory. So the first cache lines of the next run are prefetched while one is copied. Long runs
 * are written into the pool by non-temporal stores, past the caches: the lines that they go to need not be read first, and
 * seldom does anybody read them soon. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LINE_BYTES = 64, LINES_AHEAD = 2, SHORTEST_STREAMED = 2048 };

typedef struct {
    int64_t count, stride;
} Loop;

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

/* Copies all blocks: to `packed` if `is_gather`, or else from there. Loops are those of a block, the slowest first. */
void kvferry_copy_blocks(const int64_t *starts, int64_t blocks, const Loop *loops, int64_t num_loops, size_t length,
                         char *packed, int is_gather) {
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
