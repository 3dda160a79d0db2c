// Text to ids: the longest token at each place, over UTF-8 bytes.
//
// The beginnings of all tokens are the nodes of a tree, and a table finds the child of a node by a byte. An
// entry of 64 bits says all of a child: its key, which is its parent and the byte; its own number, if it has
// children; and its token, if it is one. It is at the first free place from where its key is sent, and at
// least half of all places are free. The 65,529 tokens of the World vocabulary have 116,078 beginnings, which
// take 2 MB: they stay in the cache of a core. Test: test/unit/test_encoder.py.
//
// What is used of Python is in its stable ABI (3.10), and declared here: so none of its headers is needed.

#include <cstdint>
#include <cstdlib>
#include <vector>

extern "C" {
typedef struct _object PyObject;
struct PyMethodDef {
    const char* name;
    PyObject* (*function)(PyObject*, PyObject*);
    int flags;
    const char* doc;
};
const char* PyUnicode_AsUTF8AndSize(PyObject* text, intptr_t* size);
PyObject* PyErr_NoMemory();
PyObject* PyList_New(intptr_t size);
int PyList_SetItem(PyObject* list, intptr_t place, PyObject* item);
PyObject* PyLong_FromLong(long number);
PyObject* PyCapsule_New(void* pointer, const char* name, void (*destructor)(PyObject*));
void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
PyObject* PyCFunction_NewEx(PyMethodDef* method, PyObject* self, PyObject* module);
void Py_DecRef(PyObject* object);
}

namespace {

constexpr int ONE_OBJECT = 8;           // METH_O
constexpr int NUMBER = 20, TOKEN = 16;  // bits of an entry, from the lowest: the child's number, its token
constexpr uint64_t NONE = (1 << TOKEN) - 1;
constexpr uint8_t FIRST_OF_SEVERAL = 0xc0;  // and above: the first byte of a character of several

struct Tree {
    int bits = 17;  // of places in the table
    std::vector<uint64_t> table = std::vector<uint64_t>((size_t)1 << bits);
    uint64_t of_byte[256] = {};  // entries of the root's children, which are not in the table
    uint64_t entries = 0, numbers = 1;

    static uint64_t number(uint64_t entry) { return entry & ((1 << NUMBER) - 1); }
    static uint64_t token(uint64_t entry) { return entry >> NUMBER & NONE; }
    static uint64_t key(uint64_t entry) { return entry >> (NUMBER + TOKEN); }
    static uint64_t key(uint64_t parent, uint8_t byte) { return parent << 8 | byte; }

    size_t home(uint64_t wanted) const { return (uint32_t)wanted * 0x9e3779b1u >> (32 - bits); }

    // Where the entry of a key is, or where it goes.
    size_t place(uint64_t wanted) const {
        size_t at = home(wanted);
        while (table[at] && key(table[at]) != wanted) at = (at + 1) & (table.size() - 1);
        return at;
    }

    void grow() {
        std::vector<uint64_t> old((size_t)1 << ++bits);
        old.swap(table);
        for (const uint64_t entry : old)
            if (entry) table[place(key(entry))] = entry;
    }

    void add(const uint8_t* bytes, int64_t size, uint64_t id) {
        while ((entries + size) * 2 > table.size()) grow();
        uint64_t* entry = &of_byte[*bytes];
        if (!*entry) *entry = NONE << NUMBER;
        for (int64_t i = 1; i < size; i++) {
            if (!number(*entry)) *entry |= numbers++;
            const uint64_t wanted = key(number(*entry), bytes[i]);
            entry = &table[place(wanted)];
            if (*entry) continue;
            *entry = wanted << (NUMBER + TOKEN) | NONE << NUMBER;
            entries++;
        }
        *entry = (*entry & ~(NONE << NUMBER)) | id << NUMBER;
    }

    // Have the entries of words that begin in these bytes come to the cache, many at a time. `encode` finds
    // one entry after the other, and after a pause each comes from memory.
    void fetch(const uint8_t* next, const uint8_t* end) const {
        constexpr int MANY = 64;
        const uint8_t* at[MANY];
        uint64_t entry[MANY];
        while (next < end) {
            int count = 0;
            for (; next < end && count < MANY; next++) {
                const bool begins = *next >= FIRST_OF_SEVERAL || *next == ' ';
                if (!begins || next + 1 == end || next[1] == ' ') continue;
                entry[count] = of_byte[*next];
                at[count++] = next + 1;
            }
            while (count) {
                for (int i = 0; i < count; i++)
                    __builtin_prefetch(&table[home(key(number(entry[i]), *at[i]))]);
                asm volatile("");  // without it a compiler sees nothing that all this does
                int left = 0;
                for (int i = 0; i < count; i++) {
                    const uint64_t child = table[place(key(number(entry[i]), *at[i]))];
                    if (!number(child) || at[i] + 1 == end) continue;
                    entry[left] = child;
                    at[left++] = at[i] + 1;
                }
                count = left;
            }
        }
    }

    // The ids of bytes; returns how many.
    int64_t encode(const uint8_t* next, const uint8_t* end, int32_t* ids) const {
        int32_t* id = ids;
        while (next < end) {
            uint64_t entry = of_byte[*next++], found = token(entry);
            for (const uint8_t* ahead = next; ahead < end && number(entry);) {
                entry = table[place(key(number(entry), *ahead++))];
                if (!entry) break;
                if (token(entry) == NONE) continue;
                found = token(entry);
                next = ahead;
            }
            *id++ = (int32_t)found;
        }
        return id - ids;
    }
};

void forget(PyObject* capsule) { delete static_cast<Tree*>(PyCapsule_GetPointer(capsule, nullptr)); }

PyObject* list_of(const int32_t* ids, int64_t count) {
    PyObject* const list = PyList_New(count);
    for (int64_t i = 0; list && i < count; i++) {
        PyObject* const number = PyLong_FromLong(ids[i]);
        if (!number) {
            Py_DecRef(list);
            return nullptr;
        }
        PyList_SetItem(list, i, number);  // which takes the reference
    }
    return list;
}

PyObject* encode(PyObject* capsule, PyObject* text) {
    constexpr intptr_t FEW = 512, LONG = 128;
    intptr_t size = 0;
    const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    if (!utf8) return nullptr;
    const Tree* const tree = static_cast<const Tree*>(PyCapsule_GetPointer(capsule, nullptr));
    int32_t few[FEW];
    int32_t* const ids = size <= FEW ? few : static_cast<int32_t*>(malloc(size * sizeof(int32_t)));
    if (!ids) return PyErr_NoMemory();
    const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(utf8);
    if (size >= LONG) tree->fetch(bytes, bytes + size);
    PyObject* const list = list_of(ids, tree->encode(bytes, bytes + size, ids));
    if (ids != few) free(ids);
    return list;
}

PyMethodDef method = {"encode", encode, ONE_OBJECT, nullptr};

}  // namespace

// A function of Python from a text to the list of its ids; it raises what str.encode does. ends: where the
// bytes of each token end, [tokens]; an id is a place among them, below NONE. Every byte must be a token;
// those without bytes are left out. The caller has the interpreter's lock. Null with MemoryError.
extern "C" PyObject* new_encoder(const uint8_t* bytes, const int64_t* ends, int64_t tokens) {
    Tree* tree = nullptr;
    try {
        tree = new Tree;
        for (int64_t id = 0, at = 0; id < tokens; at = ends[id++])
            if (at < ends[id]) tree->add(bytes + at, ends[id] - at, id);
    } catch (...) {
        delete tree;
        return PyErr_NoMemory();
    }
    PyObject* const capsule = PyCapsule_New(tree, nullptr, forget);
    if (!capsule) {
        delete tree;
        return nullptr;
    }
    PyObject* const function = PyCFunction_NewEx(&method, capsule, nullptr);
    Py_DecRef(capsule);
    return function;
}
