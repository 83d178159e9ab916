/*
 * A QEMU TCG plugin that counts guest instructions between two addresses and,
 * when asked, attributes them to addresses and to functions.
 *
 * Arguments:
 *   start=ADDR      first instruction of the kernel (its physical entry point)
 *   end=ADDR        first instruction of PID 1; reaching it ends the run
 *   out=FILE        where the result goes
 *   profile=on      also count per address and per function
 *   chart=FILE      with profile: where the calls go that took at least
 *   least=N         so many instructions
 *   nested=on       count only what a KVM on AMD inside this QEMU runs in its guest,
 *                   and its exits: the kernel under the monitor that will run it
 *   monitor=A-B     with nested and chart: count and chart everything, the guest, the
 *                   host's kernel, and its program with code between these addresses;
 *                   start is an address of the host then
 *   most=N          with profile: instructions after which the run ends without end
 *
 * The result is lines of text; the only one of a run that did not reach end is `unreached N`:
 *   total N                        instructions from start (included) to end (excluded)
 *   privileged N                   in, out, rdmsr, wrmsr and cpuid among them
 *   a ADDR N                       instructions executed at ADDR              (profile)
 *   p ADDR N                       the same, for privileged ones               (profile)
 *   exits N                        times the nested guest was left              (nested)
 *   x ADDR N                       times it was left in the block at ADDR       (nested)
 *   f ADDR CALLS N                 inclusive instructions of the function     (profile)
 *
 * A line of the chart is a call, in the order of their ends:
 *   STACK ADDR FROM TO LAYER       the stack's and the function's address, numbers of
 *                                  instructions since the start, and 0 for the (nested)
 *                                  guest, 1 for the host's kernel, 2 for the monitor
 *
 * Only what it uses of QEMU's plugin interface (version 1, QEMU 4.2 to 8.2) is
 * declared here, because Debian does not package the header.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t plugin_id;
typedef uint32_t meminfo;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { FLAGS_NONE = 0 };
enum { MEM_R = 1, MEM_W = 2 };
enum { INLINE_ADD = 0 };

extern void qemu_plugin_register_vcpu_tb_trans_cb(
    plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_tb_exec_cb(
    struct qemu_plugin_tb *, void (*)(unsigned, void *), int flags, void *);
extern void qemu_plugin_register_vcpu_insn_exec_cb(
    struct qemu_plugin_insn *, void (*)(unsigned, void *), int flags, void *);
extern void qemu_plugin_register_vcpu_insn_exec_inline(
    struct qemu_plugin_insn *, int op, void *, uint64_t);
extern void qemu_plugin_register_vcpu_mem_cb(
    struct qemu_plugin_insn *, void (*)(unsigned, meminfo, uint64_t, void *), int flags, int rw,
    void *);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
extern uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t start_addr, end_addr;
static const char *out_path;
static bool profiling, nested, layers;
static uint64_t monitor_from, monitor_to;
static FILE *chart;
static uint64_t least;
static uint64_t most = UINT64_MAX;
static bool started;

/* Nested: whether the guest's guest runs. QEMU keeps translations of the two apart,
 * so what is translated while it runs is executed only by it. */
static bool inside;
static uint64_t after_vmrun;
static uint64_t last_block;
static uint64_t exits;

static uint64_t total;   /* instructions so far */
static uint64_t at_start;
static uint64_t privileged; /* those that leave the guest on real hardware */

/* --- tables keyed by address: open addressing, never shrinks -------------- */

struct slot {
    uint64_t key;   /* address, 0 = free */
    uint64_t count; /* instructions, or inclusive instructions */
    uint64_t calls;
    uint64_t depth; /* activations now on some stack; only the outermost is credited */
    uint64_t exits;
    bool privileged;
};
#define SLOTS (1u << 20)
static struct slot *addresses, *functions;

static struct slot *find(struct slot *table, uint64_t key)
{
    uint64_t h = (key * 0x9e3779b97f4a7c15ull) >> 44;
    while (table[h].key && table[h].key != key)
        h = (h + 1) & (SLOTS - 1);
    table[h].key = key;
    return &table[h];
}

/* --- the result ---------------------------------------------------------- */

static FILE *open_result(void)
{
    FILE *out = fopen(out_path, "w");
    if (!out) {
        perror(out_path);
        _exit(1);
    }
    return out;
}

static void close_result(FILE *out)
{
    if (fclose(out)) {
        perror(out_path);
        _exit(1);
    }
    _exit(0);
}

static void give_up(void)
{
    FILE *out = open_result();
    fprintf(out, "unreached %" PRIu64 "\n", total - at_start);
    close_result(out);
}

/* --- a shadow of the call stacks -------------------------------------------- */

enum layer { GUEST, HOST, MONITOR };

/* Kernel stacks are 16 KiB, aligned; each has its own clock, so that a function
 * that sleeps is not charged with what others do meanwhile. */
#define STACK_SHIFT 14
/* Those of a program's threads have any place and size, and may lie side by side. An
 * event belongs to the stack that was last used at most this far away. */
#define THREAD_REACH (48u << 10)
struct frame {
    uint64_t sp; /* where the return address lies */
    struct slot *function;
    uint64_t entered; /* the stack's clock */
    uint64_t began;   /* all instructions */
};
struct stack {
    uint64_t key;
    enum layer layer;
    uint64_t last; /* where it was last used */
    uint64_t clock;
    size_t depth;
    struct frame frames[512];
};
static struct stack *stacks[1024];
static struct stack *running;
static uint64_t last_event;

static enum layer layer_of(uint64_t sp)
{
    if (!layers || inside)
        return GUEST;
    return sp >> 63 ? HOST : MONITOR;
}

static struct stack *stack_of(uint64_t sp)
{
    enum layer layer = layer_of(sp);
    uint64_t key = (sp >> STACK_SHIFT) | 1ull << 63 | (uint64_t)layer << 60;
    if (layer == MONITOR)
        for (size_t i = 0; i < 1024; i++)
            if (stacks[i] && stacks[i]->layer == MONITOR &&
                sp - stacks[i]->last + THREAD_REACH < 2 * THREAD_REACH)
                return stacks[i];
    size_t h = (key * 0x9e3779b97f4a7c15ull) >> 54;
    for (size_t i = 0; i < 1024; i++, h = (h + 1) & 1023) {
        if (!stacks[h]) {
            stacks[h] = calloc(1, sizeof(struct stack));
            stacks[h]->key = key;
            stacks[h]->layer = layer;
        }
        if (stacks[h]->key == key)
            return stacks[h];
    }
    abort();
}

/* The two kernels have the same addresses. Applied twice, it gives the address again. */
static uint64_t key_of(enum layer layer, uint64_t address)
{
    return address ^ (uint64_t)layer << 56;
}

static void leave(struct stack *s)
{
    struct frame *f = &s->frames[--s->depth];
    /* What a thread of the monitor has the kernel do is on another stack. */
    uint64_t length = s->layer == MONITOR ? total - f->began : s->clock - f->entered;
    if (chart && length >= least)
        fprintf(chart, "%" PRIx64 " %" PRIx64 " %" PRIu64 " %" PRIu64 " %d\n",
                s->key << STACK_SHIFT, key_of(s->layer, f->function->key), f->began - at_start,
                total - at_start, s->layer);
    if (--f->function->depth == 0)
        f->function->count += s->clock - f->entered;
}

static struct stack *arrive(uint64_t sp)
{
    struct stack *s = stack_of(sp);
    (running ? running : s)->clock += total - last_event;
    last_event = total;
    running = s;
    s->last = sp;
    return s;
}

/* The processor's own stack, on which the kernel only enters: it returns on another one. */
static bool is_entry_stack(uint64_t sp)
{
    return sp >> 39 == 0x1fffffc;
}

static struct stack *pending; /* an indirect call whose target is the next block */
static uint64_t pending_sp;

static void enter(struct stack *s, uint64_t sp, uint64_t target)
{
    while (s->depth && s->frames[s->depth - 1].sp <= sp)
        leave(s);
    if (s->depth == 512)
        return;
    /* Other programs. */
    if (s->layer == MONITOR && (target < monitor_from || target >= monitor_to))
        return;
    struct slot *f = find(functions, key_of(s->layer, target));
    f->calls++;
    f->depth++;
    s->frames[s->depth++] = (struct frame){
        .sp = sp, .function = f, .entered = s->clock, .began = total
    };
}

static void on_call(unsigned cpu, meminfo info, uint64_t vaddr, void *target)
{
    if (!started || is_entry_stack(vaddr))
        return;
    struct stack *s = arrive(vaddr);
    if (target) {
        enter(s, vaddr, (uint64_t)target);
    } else {
        pending = s;
        pending_sp = vaddr;
    }
}

static void on_return(unsigned cpu, meminfo info, uint64_t vaddr, void *data)
{
    if (!started || is_entry_stack(vaddr))
        return;
    struct stack *s = arrive(vaddr);
    while (s->depth && s->frames[s->depth - 1].sp <= vaddr)
        leave(s);
}

static void on_block(unsigned cpu, void *address)
{
    if (started && total - at_start > most)
        give_up();
    if (pending) {
        enter(pending, pending_sp, (uint64_t)address);
        pending = NULL;
    }
}

/* --- in and out of a nested guest ------------------------------------------- */

static void on_vmrun(unsigned cpu, void *data)
{
    inside = true;
}

/* The instruction after VMRUN: where the host continues after an exit. */
static void on_exit_from_guest(unsigned cpu, void *data)
{
    if (!inside)
        return;
    inside = false;
    if (!started)
        return;
    exits++;
    if (last_block)
        find(addresses, last_block)->exits++;
}

static void on_guest_block(unsigned cpu, void *address)
{
    last_block = (uint64_t)address;
}

/* --- start and end --------------------------------------------------------- */

static void on_start(unsigned cpu, void *data)
{
    if (started)
        return;
    started = true;
    at_start = total;
    last_event = total;
    privileged = 0;
    exits = 0;
    for (size_t i = 0; i < SLOTS; i++)
        addresses[i].count = addresses[i].exits = 0;
}

static void on_end(unsigned cpu, void *data)
{
    if (!started)
        return;
    FILE *out = open_result();
    fprintf(out, "total %" PRIu64 "\nprivileged %" PRIu64 "\n", total - at_start, privileged);
    if (nested) {
        fprintf(out, "exits %" PRIu64 "\n", exits);
        for (size_t i = 0; i < SLOTS; i++)
            if (addresses[i].exits)
                fprintf(out, "x %" PRIx64 " %" PRIu64 "\n", addresses[i].key, addresses[i].exits);
    }
    if (profiling) {
        for (size_t i = 0; i < 1024; i++)
            while (stacks[i] && stacks[i]->depth)
                leave(stacks[i]);
        for (size_t i = 0; i < SLOTS; i++) {
            if (addresses[i].count)
                fprintf(out, "a %" PRIx64 " %" PRIu64 "\n", addresses[i].key, addresses[i].count);
            if (addresses[i].count && addresses[i].privileged)
                fprintf(out, "p %" PRIx64 " %" PRIu64 "\n", addresses[i].key, addresses[i].count);
            if (functions[i].calls)
                fprintf(out, "f %" PRIx64 " %" PRIu64 " %" PRIu64 "\n", functions[i].key,
                        functions[i].calls, functions[i].count);
        }
    }
    if (chart && fclose(chart)) {
        perror("the chart");
        _exit(1);
    }
    close_result(out);
}

/* --- translation ------------------------------------------------------------ */

/* in, out, ins, outs, cpuid, rdmsr, wrmsr: each leaves the guest, or may. */
static bool is_privileged(const uint8_t *code, size_t size)
{
    size_t i = 0;
    while (i < size && (code[i] == 0x66 || code[i] == 0xf2 || code[i] == 0xf3))
        i++;
    if (i >= size)
        return false;
    if (code[i] == 0x0f && i + 1 < size)
        return code[i + 1] == 0xa2 || code[i + 1] == 0x30 || code[i + 1] == 0x32;
    return (code[i] >= 0xe4 && code[i] <= 0xe7) || (code[i] >= 0xec && code[i] <= 0xef) ||
           (code[i] >= 0x6c && code[i] <= 0x6f);
}

static void watch_calls(struct qemu_plugin_insn *insn, uint64_t vaddr)
{
    const uint8_t *code = qemu_plugin_insn_data(insn);
    size_t size = qemu_plugin_insn_size(insn);
    size_t i = 0;
    if (size == 5 && code[0] == 0xe8) {
        int32_t relative;
        memcpy(&relative, code + 1, 4);
        qemu_plugin_register_vcpu_mem_cb(insn, on_call, FLAGS_NONE, MEM_W,
                                         (void *)(vaddr + 5 + relative));
        return;
    }
    while (i < size && (code[i] == 0x2e || code[i] == 0x3e || (code[i] & 0xf0) == 0x40))
        i++;
    if (i + 1 < size && code[i] == 0xff && (code[i + 1] >> 3 & 7) == 2)
        qemu_plugin_register_vcpu_mem_cb(insn, on_call, FLAGS_NONE, MEM_W, NULL);
    if (i < size && code[i] == 0xc3)
        qemu_plugin_register_vcpu_mem_cb(insn, on_return, FLAGS_NONE, MEM_R, NULL);
}

/* In the host of a nested guest only the way in and out matters. */
static void watch_vmrun(struct qemu_plugin_tb *tb)
{
    size_t n = qemu_plugin_tb_n_insns(tb);
    for (size_t i = 0; i < n; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        uint64_t vaddr = qemu_plugin_insn_vaddr(insn);
        if (qemu_plugin_insn_size(insn) == 3 &&
            !memcmp(qemu_plugin_insn_data(insn), "\x0f\x01\xd8", 3)) {
            after_vmrun = vaddr + 3;
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_vmrun, FLAGS_NONE, NULL);
        }
        if (after_vmrun && vaddr == after_vmrun)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_exit_from_guest, FLAGS_NONE, NULL);
    }
}

static void on_translate(plugin_id id, struct qemu_plugin_tb *tb)
{
    size_t n = qemu_plugin_tb_n_insns(tb);
    /* The host's way out of the guest is translated before it is executed. */
    bool way_out = qemu_plugin_insn_vaddr(qemu_plugin_tb_get_insn(tb, 0)) == after_vmrun;
    if (nested && (!inside || way_out)) {
        watch_vmrun(tb);
        if (!layers)
            return;
    } else if (nested && !layers)
        qemu_plugin_register_vcpu_tb_exec_cb(
            tb, on_guest_block, FLAGS_NONE,
            (void *)qemu_plugin_insn_vaddr(qemu_plugin_tb_get_insn(tb, 0)));
    for (size_t i = 0; i < n; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        uint64_t vaddr = qemu_plugin_insn_vaddr(insn);
        if (vaddr == start_addr)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_start, FLAGS_NONE, NULL);
        if (vaddr == end_addr)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_end, FLAGS_NONE, NULL);
        qemu_plugin_register_vcpu_insn_exec_inline(insn, INLINE_ADD, &total, 1);
        bool leaves = is_privileged(qemu_plugin_insn_data(insn), qemu_plugin_insn_size(insn));
        if (leaves)
            qemu_plugin_register_vcpu_insn_exec_inline(insn, INLINE_ADD, &privileged, 1);
        if (!profiling)
            continue;
        if (i == 0)
            qemu_plugin_register_vcpu_tb_exec_cb(tb, on_block, FLAGS_NONE, (void *)vaddr);
        watch_calls(insn, vaddr);
        /* Of all programs of the host there are too many. */
        if (layers)
            continue;
        struct slot *slot = find(addresses, vaddr);
        slot->privileged = leaves;
        qemu_plugin_register_vcpu_insn_exec_inline(insn, INLINE_ADD, &slot->count, 1);
    }
}

/* The second argument describes the target; nothing of it is needed. */
__attribute__((visibility("default"))) int qemu_plugin_install(plugin_id id, const void *info,
                                                               int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "start=", 6))
            start_addr = strtoull(argv[i] + 6, NULL, 0);
        else if (!strncmp(argv[i], "end=", 4))
            end_addr = strtoull(argv[i] + 4, NULL, 0);
        else if (!strncmp(argv[i], "out=", 4))
            out_path = strdup(argv[i] + 4);
        else if (!strcmp(argv[i], "profile=on"))
            profiling = true;
        else if (!strncmp(argv[i], "least=", 6))
            least = strtoull(argv[i] + 6, NULL, 0);
        else if (!strncmp(argv[i], "most=", 5))
            most = strtoull(argv[i] + 5, NULL, 0);
        else if (!strncmp(argv[i], "chart=", 6)) {
            chart = fopen(argv[i] + 6, "w");
            if (!chart) {
                perror(argv[i] + 6);
                return 1;
            }
        } else if (!strcmp(argv[i], "nested=on"))
            nested = true;
        else if (sscanf(argv[i], "monitor=%" SCNx64 "-%" SCNx64, &monitor_from, &monitor_to) == 2)
            layers = true;
        else {
            fprintf(stderr, "measure-plugin: unknown argument %s\n", argv[i]);
            return 1;
        }
    }
    if (!start_addr || !end_addr || !out_path) {
        fprintf(stderr, "measure-plugin: start=, end= and out= are needed\n");
        return 1;
    }
    addresses = calloc(SLOTS, sizeof(struct slot));
    functions = calloc(SLOTS, sizeof(struct slot));
    if (!addresses || !functions)
        return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate);
    return 0;
}
