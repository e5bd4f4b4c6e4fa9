package main

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/controller-manager/pkg/informerfactory"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/daemon"
	"k8s.io/kubernetes/pkg/controller/garbagecollector"
	"k8s.io/kubernetes/pkg/controller/job"
	"k8s.io/kubernetes/pkg/controller/namespace"
	"k8s.io/kubernetes/pkg/controller/serviceaccount"
)

// discoveredEvery is the interval between two looks for new kinds.
const discoveredEvery = 5 * time.Second

// startControllers runs those of kube-controller-manager that a chart's objects need: accounts of new namespaces,
// daemon sets, jobs, the removal of what belongs to removed objects, and the end of namespaces. All others are left
// out: they would be the larger part of this program.
func startControllers(ctx context.Context, config *rest.Config) error {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	about, err := metadata.NewForConfig(config)
	if err != nil {
		return err
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	go wait.UntilWithContext(ctx, func(context.Context) { mapper.Reset() }, discoveredEvery)
	shared := informers.NewSharedInformerFactory(client, 0)
	all := informerfactory.NewInformerFactory(shared, metadatainformer.NewSharedInformerFactory(about, 0))
	started := make(chan struct{})

	accounts, err := serviceaccount.NewServiceAccountsController(klog.FromContext(ctx),
		shared.Core().V1().ServiceAccounts(), shared.Core().V1().Namespaces(), client,
		serviceaccount.DefaultServiceAccountsControllerOptions())
	if err != nil {
		return fmt.Errorf("service accounts: %w", err)
	}
	daemons, err := daemon.NewDaemonSetsController(ctx, shared.Apps().V1().DaemonSets(),
		shared.Apps().V1().ControllerRevisions(), shared.Core().V1().Pods(), shared.Core().V1().Nodes(), client,
		flowcontrol.NewBackOff(time.Second, time.Minute))
	if err != nil {
		return fmt.Errorf("daemon sets: %w", err)
	}
	jobs, err := job.NewController(ctx, client, shared.Core().V1().Pods(), shared.Batch().V1().Jobs(), nil, nil)
	if err != nil {
		return fmt.Errorf("jobs: %w", err)
	}
	garbage, err := garbagecollector.NewGarbageCollector(ctx, client, about, mapper,
		garbagecollector.DefaultIgnoredResources(), all, started)
	if err != nil {
		return fmt.Errorf("garbage: %w", err)
	}
	namespaces := namespace.NewNamespaceController(ctx, client, about,
		client.Discovery().ServerPreferredNamespacedResources, shared.Core().V1().Namespaces(), time.Minute,
		v1.FinalizerKubernetes)

	all.Start(ctx.Done())
	close(started)
	go accounts.Run(ctx, 1)
	go daemons.Run(ctx, 2)
	go jobs.Run(ctx, 2)
	go garbage.Run(ctx, 5, readyWithin)
	go garbage.Sync(ctx, client.Discovery(), discoveredEvery)
	go namespaces.Run(ctx, 2)
	return nil
}

// untilAccountsExist waits for the account of pods without one: before that no pod can be made.
func untilAccountsExist(ctx context.Context, config *rest.Config) error {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	exists := func(ctx context.Context) (bool, error) {
		_, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, nil
	}
	if err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, exists); err != nil {
		return fmt.Errorf("the service account of the namespace default does not come: %w", err)
	}
	return nil
}
