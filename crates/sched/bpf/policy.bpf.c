// SPDX-License-Identifier: GPL-2.0-only
/*
 * The policy of jiffy-sched, for sched_ext (Linux 6.12, Documentation/scheduler/sched-ext.rst).
 *
 * Four classes, each with a queue: a CPU takes its next task from the first one that is not empty.
 *
 *   urgent      the daemon and the pager, which the others wait for; kernel threads
 *   launch      VMs that start: in the order in which they were launched
 *   steady      everything else on the host, by the time that each was given, and its weight
 *   background  nice 10 and more, SCHED_IDLE
 *
 * Whatever the classes above want, each CPU gives steady tasks a turn every STEADY_WAIT, and
 * background tasks one every BACKGROUND_WAIT. A VM that has used up the CPU time of a launch is
 * steady from then on, and so is an urgent task for as long as it does not sleep, or with a nice value.
 *
 * The types hold the members that are used here; libbpf finds their places in the running kernel.
 */

typedef unsigned int u32;
typedef int s32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define KFUNC __attribute__((section(".ksyms")))
#define WEAK_KFUNC __attribute__((section(".ksyms"), weak))
#define NULL ((void *)0)
#define MS 1000000ULL

enum class { URGENT, LAUNCH, STEADY, BACKGROUND, CLASSES };

/* Slices, nanoseconds: a launch that needs less is not interrupted by others. */
#define URGENT_SLICE (5 * MS)
#define LAUNCH_SLICE (20 * MS)
#define STEADY_SLICE (5 * MS)
/* Nanoseconds after which a CPU gives a class a turn, whatever the classes above it want. */
#define STEADY_WAIT (20 * MS)
#define BACKGROUND_WAIT (100 * MS)
/* How far the time that a task was given may differ from that of its class. */
#define MOST_AHEAD (100 * MS)

/* include/linux/sched/ext.h, include/linux/sched.h, include/linux/sched/prio.h,
 * include/uapi/linux/sched.h */
#define SCX_DSQ_LOCAL ((1ULL << 63) | 2)
#define SCX_TASK_QUEUED 1
#define SCX_KICK_IDLE 1
#define SCX_KICK_PREEMPT 2
#define PF_KTHREAD 0x00200000
#define NICE_0 120
#define NICE_10 130
#define SCHED_IDLE 5

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct cpumask {
	unsigned long bits[1];
};

struct sched_ext_entity {
	u32 flags;
	u32 weight;
	u64 slice;
	u64 dsq_vtime;
};

struct task_struct {
	u32 flags;
	u32 policy;
	s32 static_prio;
	s32 nr_cpus_allowed;
	s32 pid;
	s32 tgid;
	const struct cpumask *cpus_ptr;
	struct cpumask cpus_mask;	/* so that clang describes the type; not used */
	struct sched_ext_entity scx;
};

enum scx_exit_kind { SCX_EXIT_NONE };

struct scx_exit_info {
	enum scx_exit_kind kind;
};

#pragma clang attribute pop

struct sched_ext_ops {
	int (*select_cpu)(u64 *);
	int (*enqueue)(u64 *);
	int (*dispatch)(u64 *);
	int (*running)(u64 *);
	int (*stopping)(u64 *);
	int (*enable)(u64 *);
	int (*exit_task)(u64 *);
	int (*init)(u64 *);
	int (*exit)(u64 *);
	u32 timeout_ms;
	char name[128];
};

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;

struct bpf_iter_num {
	u64 opaque[1];
} __attribute__((aligned(8)));

extern int bpf_iter_num_new(struct bpf_iter_num *it, int start, int end) KFUNC;
extern int *bpf_iter_num_next(struct bpf_iter_num *it) KFUNC;
extern void bpf_iter_num_destroy(struct bpf_iter_num *it) KFUNC;
extern _Bool bpf_cpumask_test_cpu(u32 cpu, const struct cpumask *cpumask) KFUNC;

extern s32 scx_bpf_create_dsq(u64 dsq, s32 node) KFUNC;
extern s32 scx_bpf_select_cpu_dfl(struct task_struct *p, s32 prev, u64 flags, _Bool *is_idle) KFUNC;
extern s32 scx_bpf_pick_idle_cpu(const struct cpumask *allowed, u64 flags) KFUNC;
extern s32 scx_bpf_task_cpu(const struct task_struct *p) KFUNC;
extern void scx_bpf_kick_cpu(s32 cpu, u64 flags) KFUNC;
/* Linux 6.12; from 6.13 on, each has the name below it. */
extern void scx_bpf_dispatch(struct task_struct *p, u64 dsq, u64 slice, u64 flags) WEAK_KFUNC;
extern void scx_bpf_dsq_insert(struct task_struct *p, u64 dsq, u64 slice, u64 flags) WEAK_KFUNC;
extern void scx_bpf_dispatch_vtime(struct task_struct *p, u64 dsq, u64 slice, u64 vtime,
				   u64 flags) WEAK_KFUNC;
extern void scx_bpf_dsq_insert_vtime(struct task_struct *p, u64 dsq, u64 slice, u64 vtime,
				     u64 flags) WEAK_KFUNC;
extern _Bool scx_bpf_consume(u64 dsq) WEAK_KFUNC;
extern _Bool scx_bpf_dsq_move_to_local(u64 dsq) WEAK_KFUNC;

/* What the daemon told about a process; crates/sched/src/told.rs writes the same. */
struct told {
	u64 sequence;	/* of launches */
	u64 budget;	/* CPU time of a launch that is left, ns */
	u32 class;
	u32 unused;
};

struct {
	int (*type)[1];	/* BPF_MAP_TYPE_HASH */
	u32 *key;	/* the process id */
	struct told *value;
	int (*max_entries)[65536];
} told SEC(".maps");

struct cpu {
	u64 since;		/* when its task began to run, ns */
	u64 steady_at;		/* when a steady task ran last */
	u64 background_at;
	u32 class;		/* of its task */
	u32 taken;		/* 1 + the class whose queue its next task was taken from, or 0 */
	u32 turn;		/* its task must not be preempted: it waited for long */
};

struct {
	int (*type)[2];	/* BPF_MAP_TYPE_ARRAY */
	u32 *key;
	struct cpu *value;
	int (*max_entries)[1];	/* the loader sets the number of CPUs */
} cpus SEC(".maps");

/* Written by the loader before the policy is loaded. */
struct settings {
	u32 processors;
	/* For the test of the kernel's watchdog: background tasks never run. */
	u32 starve_background;
};

const volatile struct settings settings SEC(".rodata.settings") = { .processors = 1 };

/* Read by the loader: why the kernel has ended the policy (enum scx_exit_kind), 0 before. */
u32 ended SEC(".data.ended") = 0;

/* The time that a task of the class was given which ran last: new ones begin there. */
static u64 clocks[CLASSES];

static void insert(struct task_struct *p, u64 dsq, u64 slice, u64 flags)
{
	if (scx_bpf_dsq_insert)
		scx_bpf_dsq_insert(p, dsq, slice, flags);
	else
		scx_bpf_dispatch(p, dsq, slice, flags);
}

static void insert_vtime(struct task_struct *p, u64 dsq, u64 slice, u64 vtime, u64 flags)
{
	if (scx_bpf_dsq_insert_vtime)
		scx_bpf_dsq_insert_vtime(p, dsq, slice, vtime, flags);
	else
		scx_bpf_dispatch_vtime(p, dsq, slice, vtime, flags);
}

static int take(struct cpu *cpu, u32 class)
{
	if (!(scx_bpf_dsq_move_to_local ? scx_bpf_dsq_move_to_local(class) : scx_bpf_consume(class)))
		return 0;
	cpu->taken = 1 + class;
	return 1;
}

static struct told *told_of(struct task_struct *p)
{
	u32 tgid = p->tgid;

	return bpf_map_lookup_elem(&told, &tgid);
}

static struct cpu *cpu_of(s32 number)
{
	u32 key = number;

	return bpf_map_lookup_elem(&cpus, &key);
}

/* An urgent task that used its slice and did not sleep is steady meanwhile. One with a nice value, such
 * as a thread that compresses a snapshot, is always. */
static u32 class_of(struct task_struct *p)
{
	struct told *found;
	u32 class = STEADY;

	if (p->static_prio >= NICE_10 || p->policy == SCHED_IDLE)
		return BACKGROUND;
	if (p->flags & PF_KTHREAD)
		class = URGENT;
	else if ((found = told_of(p)))
		class = found->class;
	if (class == URGENT && (p->scx.slice == 0 || p->static_prio > NICE_0))
		class = STEADY;
	return class < CLASSES ? class : STEADY;
}

static u64 slice_of(u32 class)
{
	return class == URGENT ? URGENT_SLICE : class == LAUNCH ? LAUNCH_SLICE : STEADY_SLICE;
}

/* Preempts the CPU's task if that is of this class or a later one. */
static int preempt(s32 number, u32 least)
{
	struct cpu *cpu = cpu_of(number);

	if (!cpu || cpu->class < least || cpu->turn)
		return 0;
	scx_bpf_kick_cpu(number, SCX_KICK_PREEMPT);
	return 1;
}

/* Finds a CPU for a task that was queued: an idle one, or one that runs a later class. */
static void find_cpu(struct task_struct *p, u32 class)
{
	/* Kernel threads that preempt launches delay more of them than they help. */
	u32 least = class == URGENT && (p->flags & PF_KTHREAD) ? STEADY : class + 1;
	s32 cpu = scx_bpf_pick_idle_cpu(p->cpus_ptr, 0);
	struct bpf_iter_num it;
	int *number;

	if (cpu >= 0) {
		scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
		return;
	}
	if (least >= CLASSES || preempt(scx_bpf_task_cpu(p), least) || p->nr_cpus_allowed == 1)
		return;
	bpf_iter_num_new(&it, 0, settings.processors);
	while ((number = bpf_iter_num_next(&it))) {
		if (bpf_cpumask_test_cpu(*number, p->cpus_ptr) && preempt(*number, least))
			break;
	}
	bpf_iter_num_destroy(&it);
}

SEC("struct_ops/jiffy_select_cpu")
int jiffy_select_cpu(u64 *ctx)
{
	struct task_struct *p = (void *)ctx[0];
	_Bool is_idle = 0;
	s32 cpu = scx_bpf_select_cpu_dfl(p, ctx[1], ctx[2], &is_idle);

	if (is_idle)
		insert(p, SCX_DSQ_LOCAL, slice_of(class_of(p)), 0);
	return cpu;
}

SEC("struct_ops/jiffy_enqueue")
int jiffy_enqueue(u64 *ctx)
{
	struct task_struct *p = (void *)ctx[0];
	u64 flags = ctx[1], slice, vtime, clock;
	u32 class = class_of(p);
	struct told *found;

	slice = slice_of(class);
	if ((p->flags & PF_KTHREAD) && p->nr_cpus_allowed == 1) {
		/* Only this CPU can run it. */
		insert(p, SCX_DSQ_LOCAL, slice, flags);
		preempt(scx_bpf_task_cpu(p), STEADY);
		return 0;
	}
	if (class == URGENT) {
		insert(p, URGENT, slice, flags);
	} else if (class == LAUNCH) {
		found = told_of(p);
		insert_vtime(p, LAUNCH, slice, found ? found->sequence : 0, flags);
	} else {
		clock = clocks[class & 3];
		vtime = p->scx.dsq_vtime;
		/* One that slept long gets no more than one slice ahead of the others. */
		if ((long long)(vtime - (clock - STEADY_SLICE)) < 0)
			vtime = clock - STEADY_SLICE;
		if ((long long)(vtime - (clock + MOST_AHEAD)) > 0)
			vtime = clock + MOST_AHEAD;
		p->scx.dsq_vtime = vtime;
		insert_vtime(p, class, slice, vtime, flags);
	}
	find_cpu(p, class);
	return 0;
}

SEC("struct_ops/jiffy_dispatch")
int jiffy_dispatch(u64 *ctx)
{
	struct task_struct *prev = (void *)ctx[1];
	struct cpu *cpu = cpu_of(ctx[0]);
	u64 now = bpf_ktime_get_ns();
	u32 class = CLASSES;

	if (!cpu)
		return 0;
	/* The task that used its slice, if it can go on. */
	if (prev && (prev->scx.flags & SCX_TASK_QUEUED))
		class = class_of(prev);
	if (take(cpu, URGENT))
		return 0;
	if (class != STEADY && now - cpu->steady_at > STEADY_WAIT && take(cpu, STEADY)) {
		cpu->turn = 1;
		return 0;
	}
	if (class != BACKGROUND && now - cpu->background_at > BACKGROUND_WAIT &&
	    !settings.starve_background && take(cpu, BACKGROUND)) {
		cpu->turn = 1;
		return 0;
	}
	if (take(cpu, LAUNCH))
		return 0;
	if (class != LAUNCH) {
		if (take(cpu, STEADY))
			return 0;
		if (class != STEADY && !settings.starve_background && take(cpu, BACKGROUND))
			return 0;
	}
	if (prev && class < CLASSES) {
		prev->scx.slice = slice_of(class);
		cpu->class = class;
	}
	return 0;
}

SEC("struct_ops/jiffy_running")
int jiffy_running(u64 *ctx)
{
	struct task_struct *p = (void *)ctx[0];
	struct cpu *cpu = cpu_of(scx_bpf_task_cpu(p));
	u32 class;

	if (!cpu)
		return 0;
	/* An urgent task that is steady meanwhile was given a new slice, so its class is that of its queue. */
	class = cpu->taken ? cpu->taken - 1 : class_of(p);
	cpu->taken = 0;
	cpu->since = bpf_ktime_get_ns();
	cpu->class = class;
	if (class >= STEADY && (long long)(p->scx.dsq_vtime - clocks[class & 3]) > 0)
		clocks[class & 3] = p->scx.dsq_vtime;
	return 0;
}

SEC("struct_ops/jiffy_stopping")
int jiffy_stopping(u64 *ctx)
{
	struct task_struct *p = (void *)ctx[0];
	struct cpu *cpu = cpu_of(scx_bpf_task_cpu(p));
	u64 now = bpf_ktime_get_ns(), used;
	struct told *found;

	if (!cpu)
		return 0;
	used = now - cpu->since;
	if (cpu->class == STEADY)
		cpu->steady_at = now;
	if (cpu->class == BACKGROUND)
		cpu->background_at = now;
	if (cpu->class >= STEADY && p->scx.weight)
		p->scx.dsq_vtime += used * 100 / p->scx.weight;
	if (cpu->class == LAUNCH && (found = told_of(p)) && found->class == LAUNCH) {
		if (found->budget > used) {
			found->budget -= used;
		} else {
			found->budget = 0;
			found->class = STEADY;
		}
	}
	cpu->turn = 0;
	cpu->class = URGENT;
	return 0;
}

SEC("struct_ops/jiffy_enable")
int jiffy_enable(u64 *ctx)
{
	struct task_struct *p = (void *)ctx[0];

	p->scx.dsq_vtime = clocks[STEADY];
	return 0;
}

SEC("struct_ops/jiffy_exit_task")
int jiffy_exit_task(u64 *ctx)
{
	struct task_struct *p = (void *)ctx[0];
	u32 pid = p->pid;

	/* Its number may be given to another process. */
	if (p->pid == p->tgid)
		bpf_map_delete_elem(&told, &pid);
	return 0;
}

SEC("struct_ops.s/jiffy_init")
int jiffy_init(u64 *ctx)
{
	s32 error = 0;

	for (u32 class = URGENT; class < CLASSES && !error; class++)
		error = scx_bpf_create_dsq(class, -1);
	return error;
}

SEC("struct_ops/jiffy_exit")
int jiffy_exit(u64 *ctx)
{
	struct scx_exit_info *info = (void *)ctx[0];

	ended = info->kind;
	return 0;
}

SEC(".struct_ops.link")
struct sched_ext_ops jiffy = {
	.select_cpu = jiffy_select_cpu,
	.enqueue = jiffy_enqueue,
	.dispatch = jiffy_dispatch,
	.running = jiffy_running,
	.stopping = jiffy_stopping,
	.enable = jiffy_enable,
	.exit_task = jiffy_exit_task,
	.init = jiffy_init,
	.exit = jiffy_exit,
	/* A task that was not run for so long ends the policy. */
	.timeout_ms = 5000,
	.name = "jiffy",
};

char _license[] SEC("license") = "GPL";
