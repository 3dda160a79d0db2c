/* Records what a process does to files, and makes calls fail: a library for LD_PRELOAD (Linux), for
   power_cut.py and faults.py.

   DISK_TRACE_PREFIX   only files whose absolute path begins with this are recorded, or fail
   DISK_FAULTS         a file that holds `struct faults`, which all processes have as shared memory: it says
                       which call fails next, and gets what has failed. Connections to PostgreSQL by a Unix
                       socket fail too. Beside it, with the suffix ".stack", lies the Python stack of that
   call.

       void disk_trace_start(const char *file)              append the operations from now on to this file
       void disk_trace_mark(const char *data, size_t size)  append something of the process's own
       void disk_trace_exit(void)                           end the process between two operations

   The file is a run of records, in the byte order of the machine, without padding:

       uint32  kind          see below
       int32   descriptor    of the file, or -1
       int64   number        see below
       uint32  length of the path
       uint32  length of the data
       path, then data

       kind            number                  path          data
       1 OPEN          flags of open(2)        of the file
       2 CLOSE
       3 WRITE         offset in the file                    what was written
       4 TRUNCATE      new size
       5 SYNC_BEGIN    of this call
       6 SYNC_END      of the same call
       7 RENAME                                of the file   new path
       8 UNLINK                                of the file
       9 MKDIR                                 of the folder
       10 MARK                                               see disk_trace_mark
       11 START                                              (the descriptors of an earlier process are
   closed)

   Calls that failed are left out. One lock is held during a call and while it is recorded, so that the
   records are in the order in which things happened. A sync has two records, because others may write while
   it runs: what came before the first is on the disk at the second. fdatasync counts as fsync, since it also
   writes the size. Memory maps are not recorded; of the files here only SQLite's -shm is mapped, which no
   crash keeps. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

enum { OPEN = 1, CLOSE, WRITE, TRUNCATE, SYNC_BEGIN, SYNC_END, RENAME, UNLINK, MKDIR, MARK, START };
enum { MOST_DESCRIPTORS = 65536 };
enum { RECORDED = 1, WATCHED = 2, CONNECTED = 4 }; /* WATCHED: calls may fail; CONNECTED: to PostgreSQL */
enum {
    OPENS = 1,
    READS,
    WRITES,
    PARTS,
    SYNCS,
    RENAMES,
    UNLINKS,
    MKDIRS,
    TRUNCATES,
    MAPS,
    ALLOCATES,
    SENDS,
    RECEIVES
};
enum { KINDS = 16 };

struct record {
    uint32_t kind;
    int32_t descriptor;
    int64_t number;
    uint32_t path, data;
};

struct faults {
    volatile int32_t kind;   /* of the call that fails, as above; 0: none. PARTS: a write that takes the first
                                half, whereupon the next write fails */
    int32_t error;           /* errno */
    volatile int64_t left;   /* calls of this kind that go well before it */
    volatile int64_t times;  /* how many fail then */
    volatile int64_t fired;  /* how many have failed */
    int32_t process, thread; /* of the first that has */
    char only[256];          /* a part of the paths of which calls fail; empty: all */
    char path[512];          /* of the first that has failed */
    volatile int64_t counts[KINDS]; /* calls that could have failed, by kind */
};

static struct faults* faults;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int trace = -1;
static int64_t syncs;
static char followed[MOST_DESCRIPTORS]; /* RECORDED, WATCHED, CONNECTED */

static void fail(const char* why) {
    dprintf(2, "disk_trace: %s\n", why);
    abort();
}

/* All below go to the kernel themselves: the functions of the C library are those of this file. */

static void append(uint32_t kind, int descriptor, int64_t number, const char* path, const void* data,
                   size_t size) {
    struct record record = {kind, descriptor, number, path ? strlen(path) : 0, size};
    struct iovec parts[] = {{&record, sizeof record}, {(void*)path, record.path}, {(void*)data, size}};
    int error = errno;
    if (syscall(SYS_writev, trace, parts, 3) != (long)(sizeof record + record.path + size))
        fail("the trace cannot be written");
    errno = error;
}

static int below(const char* path) {
    const char* prefix = getenv("DISK_TRACE_PREFIX");
    return path && prefix && strncmp(path, prefix, strlen(prefix)) == 0;
}

static int wanted(const char* path) { return trace >= 0 && below(path); }

static int is(int fd, int what) { return fd >= 0 && fd < MOST_DESCRIPTORS && followed[fd] & what; }

static int is_followed(int fd) { return trace >= 0 && is(fd, RECORDED); }

__attribute__((constructor)) static void share_faults(void) {
    const char* file = getenv("DISK_FAULTS");
    int fd = file ? syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0) return;
    void* page = (void*)syscall(SYS_mmap, NULL, sizeof *faults, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (page != MAP_FAILED) faults = page;
}

/* The stack of this thread, if it runs Python: its interpreter writes one without taking any lock. */
static void write_stack(void) {
    void* (*state)(void) = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    void (*dump)(int, void*) = dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.stack", getenv("DISK_FAULTS"));
    int fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return;
    void* thread = state && dump ? state() : NULL;
    if (thread) dump(fd, thread);
    syscall(SYS_close, fd);
}

/* Whether this call is the one that fails. `path` may be NULL, and is that of the descriptor then. */
static int fails(int kind, const char* path, int fd) {
    char found[512] = "";
    __atomic_add_fetch(&faults->counts[kind], 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&faults->kind, __ATOMIC_ACQUIRE) != kind) return 0;
    if (!path) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (syscall(SYS_readlinkat, AT_FDCWD, link, found, sizeof found - 1) > 0) path = found;
    }
    if (!path || (faults->only[0] && !strstr(path, faults->only))) return 0;
    if (__atomic_fetch_sub(&faults->left, 1, __ATOMIC_ACQ_REL) > 0) return 0;
    if (__atomic_fetch_sub(&faults->times, 1, __ATOMIC_ACQ_REL) <= 0) return 0;
    if (faults->fired == 0) {
        faults->process = getpid();
        faults->thread = syscall(SYS_gettid);
        snprintf(faults->path, sizeof faults->path, "%s", path);
        write_stack();
    }
    __atomic_add_fetch(&faults->fired, 1, __ATOMIC_RELEASE);
    errno = faults->error;
    return 1;
}

static int path_fails(int kind, const char* path) { return faults && below(path) && fails(kind, path, -1); }

static int file_fails(int kind, int fd) { return faults && is(fd, WATCHED) && fails(kind, NULL, fd); }

/* How much of a write goes well, as of a disk that is full after it. */
static size_t part_of(int fd, size_t size) {
    if (!faults || !is(fd, WATCHED) || size < 2 || !fails(PARTS, NULL, fd)) return size;
    int32_t armed = PARTS;
    if (__atomic_load_n(&faults->kind, __ATOMIC_ACQUIRE) != armed) return size / 2; /* disarmed meanwhile */
    faults->left = 0;
    faults->times = 1;
    __atomic_compare_exchange_n(&faults->kind, &armed, WRITES, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return size / 2;
}

void disk_trace_start(const char* file) {
    trace = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (trace < 0) fail("the trace cannot be opened");
    append(START, -1, 0, NULL, NULL, 0);
}

void disk_trace_mark(const char* data, size_t size) {
    pthread_mutex_lock(&lock);
    append(MARK, -1, 0, NULL, data, size);
    pthread_mutex_unlock(&lock);
}

void disk_trace_exit(void) {
    pthread_mutex_lock(&lock);
    _exit(0);
}

static int open_file(int folder, const char* path, int flags, mode_t mode) {
    if (path_fails(OPENS, path)) return -1;
    if (!wanted(path)) {
        int opened = syscall(SYS_openat, folder, path, flags, mode);
        if (opened >= 0 && opened < MOST_DESCRIPTORS) followed[opened] = faults && below(path) ? WATCHED : 0;
        return opened;
    }
    pthread_mutex_lock(&lock);
    int fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= MOST_DESCRIPTORS) fail("too many descriptors");
    if (fd >= 0) {
        followed[fd] = RECORDED | WATCHED;
        append(OPEN, fd, flags, path, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE_OF(flags)                       \
    mode_t mode = 0;                         \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list more;                        \
        va_start(more, flags);               \
        mode = va_arg(more, int);            \
        va_end(more);                        \
    }

int open(const char* path, int flags, ...) {
    MODE_OF(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
    MODE_OF(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
    MODE_OF(flags)
    return open_file(folder, path, flags, mode);
}

int openat64(int folder, const char* path, int flags, ...) {
    MODE_OF(flags)
    return open_file(folder, path, flags, mode);
}

int close(int fd) {
    if (!is_followed(fd)) {
        if (fd >= 0 && fd < MOST_DESCRIPTORS) followed[fd] = 0;
        return syscall(SYS_close, fd);
    }
    pthread_mutex_lock(&lock);
    followed[fd] = 0;
    append(CLOSE, fd, 0, NULL, NULL, 0);
    int result = syscall(SYS_close, fd);
    pthread_mutex_unlock(&lock);
    return result;
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
    if (file_fails(WRITES, fd)) return -1;
    size = part_of(fd, size);
    if (!is_followed(fd)) return syscall(SYS_pwrite64, fd, data, size, offset);
    pthread_mutex_lock(&lock);
    ssize_t written = syscall(SYS_pwrite64, fd, data, size, offset);
    if (written > 0) append(WRITE, fd, offset, NULL, data, written);
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
    return pwrite64(fd, data, size, offset);
}

ssize_t write(int fd, const void* data, size_t size) {
    if (file_fails(WRITES, fd)) return -1;
    size = part_of(fd, size);
    if (!is_followed(fd)) return syscall(SYS_write, fd, data, size);
    pthread_mutex_lock(&lock);
    ssize_t written = syscall(SYS_write, fd, data, size);
    if (written > 0) append(WRITE, fd, syscall(SYS_lseek, fd, 0L, SEEK_CUR) - written, NULL, data, written);
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
    if (!is(fd, RECORDED | WATCHED)) return syscall(SYS_writev, fd, parts, count);
    ssize_t total = 0;
    for (int i = 0; i < count; i++) { /* one after the other, which a process cannot rely on not to happen */
        ssize_t written = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (written < 0) return total ? total : -1;
        total += written;
        if ((size_t)written < parts[i].iov_len) break;
    }
    return total;
}

int ftruncate64(int fd, off64_t size) {
    if (file_fails(TRUNCATES, fd)) return -1;
    if (!is_followed(fd)) return syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_ftruncate, fd, size);
    if (result == 0) append(TRUNCATE, fd, size, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int sync_file(long call, int fd) {
    if (file_fails(SYNCS, fd)) return -1;
    if (!is_followed(fd)) return syscall(call, fd);
    pthread_mutex_lock(&lock);
    int64_t number = ++syncs;
    append(SYNC_BEGIN, fd, number, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    int result = syscall(call, fd);
    pthread_mutex_lock(&lock);
    if (result == 0) append(SYNC_END, fd, number, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int fsync(int fd) { return sync_file(SYS_fsync, fd); }

int fdatasync(int fd) { return sync_file(SYS_fdatasync, fd); }

int renameat2(int from, const char* old, int to, const char* new, unsigned flags) {
    if (path_fails(RENAMES, old)) return -1;
    if (!wanted(old) && !wanted(new)) return syscall(SYS_renameat2, from, old, to, new, flags);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_renameat2, from, old, to, new, flags);
    if (result == 0) append(RENAME, -1, 0, old, new, strlen(new));
    pthread_mutex_unlock(&lock);
    return result;
}

int renameat(int from, const char* old, int to, const char* new) { return renameat2(from, old, to, new, 0); }

int rename(const char* old, const char* new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char* path, int flags) {
    if (path_fails(UNLINKS, path)) return -1;
    if (!wanted(path)) return syscall(SYS_unlinkat, folder, path, flags);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_unlinkat, folder, path, flags);
    if (result == 0) append(UNLINK, -1, 0, path, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }

int mkdirat(int folder, const char* path, mode_t mode) {
    if (path_fails(MKDIRS, path)) return -1;
    if (!wanted(path)) return syscall(SYS_mkdirat, folder, path, mode);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_mkdirat, folder, path, mode);
    if (result == 0) append(MKDIR, -1, 0, path, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* What is not recorded, and may fail. */

ssize_t read(int fd, void* data, size_t size) {
    return file_fails(READS, fd) ? -1 : syscall(SYS_read, fd, data, size);
}

ssize_t pread64(int fd, void* data, size_t size, off64_t offset) {
    return file_fails(READS, fd) ? -1 : syscall(SYS_pread64, fd, data, size, offset);
}

ssize_t pread(int fd, void* data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

void* mmap64(void* address, size_t size, int protection, int flags, int fd, off64_t offset) {
    if (file_fails(MAPS, fd)) return MAP_FAILED;
    return (void*)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap64(address, size, protection, flags, fd, offset);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    return file_fails(ALLOCATES, fd) ? -1 : syscall(SYS_fallocate, fd, mode, offset, size);
}

int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }

int posix_fallocate64(int fd, off64_t offset, off64_t size) {
    return fallocate64(fd, 0, offset, size) ? errno : 0;
}

int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

int connect(int fd, const struct sockaddr* to, socklen_t size) {
    int result = syscall(SYS_connect, fd, to, size), error = errno;
    if (faults && fd >= 0 && fd < MOST_DESCRIPTORS && to->sa_family == AF_UNIX)
        followed[fd] = strstr(((const struct sockaddr_un*)to)->sun_path, ".s.PGSQL") ? CONNECTED : 0;
    errno = error;
    return result;
}

/* As of a connection that has been lost: nothing comes from it any more. */
static int connection_fails(int kind, int fd) {
    if (!faults || !is(fd, CONNECTED) || !fails(kind, "PostgreSQL", fd)) return 0;
    syscall(SYS_shutdown, fd, SHUT_RDWR);
    errno = faults->error;
    return 1;
}

ssize_t send(int fd, const void* data, size_t size, int flags) {
    return connection_fails(SENDS, fd) ? -1 : syscall(SYS_sendto, fd, data, size, flags, NULL, 0);
}

ssize_t recv(int fd, void* data, size_t size, int flags) {
    return connection_fails(RECEIVES, fd) ? -1 : syscall(SYS_recvfrom, fd, data, size, flags, NULL, NULL);
}
