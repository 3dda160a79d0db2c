/* Records what a process does to files: a library for LD_PRELOAD (Linux), read by power_cut.py.

   DISK_TRACE_PREFIX   only files whose absolute path begins with this are recorded

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
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, CLOSE, WRITE, TRUNCATE, SYNC_BEGIN, SYNC_END, RENAME, UNLINK, MKDIR, MARK, START };
enum { MOST_DESCRIPTORS = 65536 };

struct record {
    uint32_t kind;
    int32_t descriptor;
    int64_t number;
    uint32_t path, data;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int trace = -1;
static int64_t syncs;
static char followed[MOST_DESCRIPTORS]; /* 1: the file is recorded */

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

static int wanted(const char* path) {
    const char* prefix = getenv("DISK_TRACE_PREFIX");
    return trace >= 0 && path && prefix && strncmp(path, prefix, strlen(prefix)) == 0;
}

static int is_followed(int fd) { return trace >= 0 && fd >= 0 && fd < MOST_DESCRIPTORS && followed[fd]; }

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
    if (!wanted(path)) return syscall(SYS_openat, folder, path, flags, mode);
    pthread_mutex_lock(&lock);
    int fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= MOST_DESCRIPTORS) fail("too many descriptors");
    if (fd >= 0) {
        followed[fd] = 1;
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
    if (!is_followed(fd)) return syscall(SYS_close, fd);
    pthread_mutex_lock(&lock);
    followed[fd] = 0;
    append(CLOSE, fd, 0, NULL, NULL, 0);
    int result = syscall(SYS_close, fd);
    pthread_mutex_unlock(&lock);
    return result;
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
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
    if (!is_followed(fd)) return syscall(SYS_write, fd, data, size);
    pthread_mutex_lock(&lock);
    ssize_t written = syscall(SYS_write, fd, data, size);
    if (written > 0) append(WRITE, fd, syscall(SYS_lseek, fd, 0L, SEEK_CUR) - written, NULL, data, written);
    pthread_mutex_unlock(&lock);
    return written;
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
    if (!is_followed(fd)) return syscall(SYS_writev, fd, parts, count);
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
    if (!is_followed(fd)) return syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_ftruncate, fd, size);
    if (result == 0) append(TRUNCATE, fd, size, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int sync_file(long call, int fd) {
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
    if (!wanted(path)) return syscall(SYS_unlinkat, folder, path, flags);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_unlinkat, folder, path, flags);
    if (result == 0) append(UNLINK, -1, 0, path, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }

int mkdirat(int folder, const char* path, mode_t mode) {
    if (!wanted(path)) return syscall(SYS_mkdirat, folder, path, mode);
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_mkdirat, folder, path, mode);
    if (result == 0) append(MKDIR, -1, 0, path, NULL, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
