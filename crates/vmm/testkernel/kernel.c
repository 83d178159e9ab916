/* Jiffy's PVH test kernel: prints what it was started with on COM1, then does
   what its command line asks for, the first of:
     exit         power off (also the default)
     reset        reset through the keyboard controller
     count        count in memory at COUNTER for ever, marking every COUNT_MARK
     timer        set a counter of the timer chip going and wait for it
     triplefault  crash
     devices      use a virtio disk and network interface for ever
     hlt          sleep for ever
   With `quiet` it prints nothing. */

#include "kernel.h"

struct start_info {
    u32 magic, version, flags, modules;
    u64 module_list, command_line, rsdp, memory_map;
    u32 memory_map_entries, reserved;
};
struct module { u64 address, size, command_line, reserved; };
struct range { u64 address, size; u32 type, reserved; };

#define COM1 0x3f8
#define TRACE 0x0a4a
#define POWER 0x604
#define KEYBOARD 0x64

#define COUNTER ((volatile u64 *)0x400000)
#define COUNT_MARK 0x1000000

void triple_fault(void);

static int quiet;

void print(const char *text)
{
    while (!quiet && *text)
        out8(COM1, *text++);
}

static void print_hex(u64 value)
{
    char digits[19] = "0x";
    int at = 2, shift = 60;
    while (shift > 0 && !(value >> shift))
        shift -= 4;
    for (; shift >= 0; shift -= 4)
        digits[at++] = "0123456789abcdef"[value >> shift & 15];
    digits[at] = 0;
    print(digits);
}

static void line(const char *name, u64 value)
{
    print(name);
    print(": ");
    print_hex(value);
    print("\n");
}

static int has_word(const char *line, const char *word)
{
    while (*line) {
        const char *w = word;
        while (*w && *line == *w)
            line++, w++;
        if (!*w && (!*line || *line == ' '))
            return 1;
        while (*line && *line != ' ')
            line++;
        while (*line == ' ')
            line++;
    }
    return 0;
}

/* The MP floating pointer, in the last KiB of base memory. */
static void print_processors(void)
{
    const u8 *pointer = (const u8 *)0x9fc00;
    u32 table;
    u16 count;
    u64 processors = 0;
    if (pointer[0] != '_' || pointer[1] != 'M' || pointer[2] != 'P' || pointer[3] != '_') {
        print("no MP table\n");
        return;
    }
    table = *(const u32 *)(pointer + 4);
    count = *(const u16 *)(u64)(table + 34);
    for (const u8 *entry = (const u8 *)(u64)(table + 44); count; count--) {
        processors += entry[0] == 0;
        entry += entry[0] == 0 ? 20 : 8;
    }
    line("processors", processors);
}

static void print_modules(const struct start_info *info)
{
    const struct module *modules = (const struct module *)info->module_list;
    for (u32 i = 0; i < info->modules; i++) {
        const u8 *bytes = (const u8 *)modules[i].address;
        u64 sum = 0;
        for (u64 at = 0; at < modules[i].size; at++)
            sum += bytes[at];
        print("module: ");
        print_hex(modules[i].address);
        print(" size ");
        print_hex(modules[i].size);
        print(" sum ");
        print_hex(sum);
        print("\n");
    }
}

/* Counter 2 of the 8254, from 0x7fff down, gated through port 0x61. */
static void timer(void)
{
    u32 value = 0xffff, reads = 0;
    out8(0x61, (in8(0x61) & ~2) | 1);
    out8(0x43, 0xb0);
    out8(0x42, 0xff);
    out8(0x42, 0x7f);
    while (value > 0x6000 && ++reads < 1000000) {
        out8(0x43, 0x80);
        value = in8(0x42);
        value |= in8(0x42) << 8;
    }
    print(value <= 0x6000 ? "timer counts\n" : "timer stands still\n");
}

static void count(void)
{
    /* The counter is in memory: a restored VM continues it. */
    for (;;)
        if ((++*COUNTER & (COUNT_MARK - 1)) == 0)
            out8(TRACE, 0x80);
}

void main(const struct start_info *info)
{
    const char *command_line = (const char *)info->command_line;
    const struct range *map = (const struct range *)info->memory_map;

    out8(TRACE, 0x01);
    quiet = has_word(command_line, "quiet");
    print("jiffy PVH test kernel\n");
    line("magic", info->magic);
    line("version", info->version);
    line("flags", info->flags);
    line("rsdp", info->rsdp);
    for (u32 i = 0; i < info->memory_map_entries; i++) {
        print("memory: ");
        print_hex(map[i].address);
        print(" size ");
        print_hex(map[i].size);
        print(" type ");
        print_hex(map[i].type);
        print("\n");
    }
    print_modules(info);
    print_processors();
    print("command line: ");
    print(command_line);
    print("\n");

    if (has_word(command_line, "timer"))
        timer();
    if (has_word(command_line, "count"))
        count();
    else if (has_word(command_line, "devices"))
        use_devices(command_line);
    else if (has_word(command_line, "triplefault"))
        triple_fault();
    else if (has_word(command_line, "reset"))
        out8(KEYBOARD, 0xfe);
    else if (!has_word(command_line, "hlt"))
        out16(POWER, 0x2000);
    print("asleep\n");
}
