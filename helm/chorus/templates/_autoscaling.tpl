{{/* Up at once, down slowly: a new pod has to load the model, and a cache goes with each that is taken away. */}}
{{- define "chorus.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - type: Percent
      value: 100
      periodSeconds: 60
    - type: Pods
      value: 2
      periodSeconds: 60
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownStabilizationSeconds }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: {{ .Values.autoscaling.scaleDownPeriodSeconds }}
{{- end }}

{{/* The sum over this Deployment's pods: <name>-<ReplicaSet's hash>-<5 letters>. */}}
{{- define "chorus.podQuery" -}}
sum({{ .metric }}{namespace="{{ .root.Release.Namespace }}",pod=~"{{ include "chorus.fullname" .root }}-[a-z0-9]+-[a-z0-9]{5}"})
{{- end }}
