/* A wire that is slow and breaks, for a process that starts with this library (LD_PRELOAD): see broken_wire.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define MOST_CONNECTIONS 65536
#define LEAST_BULK 4096    /* what is shorter is no bulk, and goes at once */
#define LONGEST_BURST 5e-3 /* seconds of the wire that go at once */
#define MOST_PARTS 16

static ssize_t (*real_send)(int, const void *, size_t, int);
static ssize_t (*real_sendmsg)(int, const struct msghdr *, int);
static ssize_t (*real_recv)(int, void *, size_t, int);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double bytes_per_s, credit, looked_at;
static long sent[MOST_CONNECTIONS], breaks_after = -1;
static int is_broken;

__attribute__((constructor)) static void find(void) {
    real_send = dlsym(RTLD_NEXT, "send");
    real_sendmsg = dlsym(RTLD_NEXT, "sendmsg");
    real_recv = dlsym(RTLD_NEXT, "recv");
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

/* From now on bulk is received at so many bytes a second at the most; 0 is as fast as it comes. */
void wire_is_slow(double rate) { bytes_per_s = rate; }

/* The first connection that has sent so many bytes from now on breaks. */
void wire_breaks(long after) {
    pthread_mutex_lock(&lock);
    for (int fd = 0; fd < MOST_CONNECTIONS; fd++) sent[fd] = 0;
    is_broken = 0;
    breaks_after = after;
    pthread_mutex_unlock(&lock);
}

int wire_is_broken(void) { return is_broken; }

static int is_tcp(int fd) {
    struct sockaddr_storage peer;
    socklen_t length = sizeof peer;
    return fd >= 0 && fd < MOST_CONNECTIONS && !getpeername(fd, (struct sockaddr *)&peer, &length) &&
           peer.ss_family == AF_INET;
}

static void maybe_break(int fd, size_t wanted) {
    if (!is_tcp(fd)) return;
    pthread_mutex_lock(&lock);
    if (breaks_after >= 0 && wanted >= LEAST_BULK && sent[fd] >= breaks_after) {
        is_broken = 1;
        breaks_after = -1;
        shutdown(fd, SHUT_RDWR); /* what is sent from here on fails */
    }
    pthread_mutex_unlock(&lock);
}

/* UCX refuses a put, as for want of memory, after so many from now on. */
static volatile long refuses_after = -1;
static void *(*real_put)(void *, const void *, size_t, uint64_t, void *, const void *);

void wire_refuses(long after) { __atomic_store_n(&refuses_after, after, __ATOMIC_SEQ_CST); }

static int find_ucp(struct dl_phdr_info *library, size_t size, void *unused) {
    if (strstr(library->dlpi_name, "libucp") == NULL) return 0;
    real_put = dlsym(dlopen(library->dlpi_name, RTLD_NOLOAD | RTLD_NOW), "ucp_put_nbx");
    return 1;
}

void *ucp_put_nbx(void *endpoint, const void *from, size_t length, uint64_t to, void *key, const void *how) {
    if (real_put == NULL) dl_iterate_phdr(find_ucp, NULL);
    if (refuses_after >= 0 && __atomic_fetch_sub(&refuses_after, 1, __ATOMIC_SEQ_CST) == 0) {
        return (void *)(intptr_t)-4; /* UCS_ERR_NO_MEMORY */
    }
    return real_put(endpoint, from, length, to, key, how);
}

static ssize_t count(int fd, ssize_t done) {
    if (done > 0 && fd < MOST_CONNECTIONS) __atomic_add_fetch(&sent[fd], done, __ATOMIC_RELAXED);
    return done;
}

ssize_t send(int fd, const void *from, size_t length, int flags) {
    maybe_break(fd, length);
    return count(fd, real_send(fd, from, length, flags));
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    size_t length = 0;
    for (size_t part = 0; part < message->msg_iovlen; part++) length += message->msg_iov[part].iov_len;
    maybe_break(fd, length);
    return count(fd, real_sendmsg(fd, message, flags));
}

ssize_t recv(int fd, void *to, size_t length, int flags) {
    if (bytes_per_s <= 0 || length < LEAST_BULK || !is_tcp(fd)) return real_recv(fd, to, length, flags);
    pthread_mutex_lock(&lock);
    double at = now();
    credit += (at - looked_at) * bytes_per_s;
    looked_at = at;
    if (credit > bytes_per_s * LONGEST_BURST) credit = bytes_per_s * LONGEST_BURST;
    ssize_t done = -1;
    if (credit < 1) {
        errno = EAGAIN;
    } else {
        done = real_recv(fd, to, length < credit ? length : (size_t)credit, flags);
        if (done > 0) credit -= done;
    }
    pthread_mutex_unlock(&lock);
    return done;
}
